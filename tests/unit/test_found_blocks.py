"""Which modules are streamed as blocks when none are named, in models with more than one list of layers."""

import logging

import pytest
import torch
from torch import nn

from memascend.engine.errors import NotStreamable
from memascend.engine.find_blocks import find_blocks, largest_list
from memascend.engine.model_units import ModelUnits
from memascend.engine.runtime import StreamingEngine
from memascend.memory.ledger import Ledger
from memascend.memory.pinned import PageAlignedPinnedAllocator
from memascend.ops.adamw import AdamW
from tests.unit.test_streaming_engine import SETTINGS, groups

WIDTH, WORDS = 16, 50


class Layer(nn.Module):
    def __init__(self, width=WIDTH, experts=0):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x, memory=None):
        x = x + self.down(torch.tanh(self.up(x)))
        if memory is not None:
            x = x + torch.tanh(x @ memory.transpose(1, 2)) @ memory
        return x + sum(expert(x) for expert in self.experts) if self.experts else x


class Wide(Layer):
    """A second type of layer."""


class Stack(nn.Module):
    def __init__(self, kind, depth, experts=0):
        super().__init__()
        self.layers = nn.ModuleList(kind(experts=experts) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, memory=None):
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class Encoder(Stack):
    pass


class Decoder(Stack):
    pass


class Vocabulary(nn.Module):
    """The base of every model here: what surrounds its layers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.inside(self.embedding(ids))).flatten(0, 1), ids.flatten())


class EncoderDecoder(Vocabulary):
    def __init__(self, experts=0):
        super().__init__()
        self.encoder, self.decoder = Encoder(Layer, 3, experts), Decoder(Wide, 2)

    def inside(self, x):
        return self.decoder(x, self.encoder(x))

    def expected(self):
        return [*self.encoder.layers, *self.decoder.layers]


class Towers(EncoderDecoder):
    """Two towers in a list, as some multimodal models have them."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([self.encoder, self.decoder])
        del self.encoder, self.decoder

    def inside(self, x):
        return self.towers[1](x, self.towers[0](x))

    def expected(self):
        return [*self.towers[0].layers, *self.towers[1].layers]


class UNet(Vocabulary):
    """Down and up with skip connections; stages of different widths are lists of layers."""

    def __init__(self):
        super().__init__()
        widths = [WIDTH, 2 * WIDTH, 4 * WIDTH]
        self.down = nn.ModuleList(nn.Sequential(Layer(w), Layer(w), nn.Linear(w, 2 * w)) for w in widths[:2])
        self.middle = Layer(widths[2])
        self.up = nn.ModuleList(nn.ModuleList([nn.Linear(2 * w, w), Layer(w)]) for w in reversed(widths[:2]))

    def inside(self, x):
        skips = []
        for stage in self.down:
            skips.append(x)
            x = stage(x)
        x = self.middle(x)
        for narrow, layer in self.up:
            x = layer(narrow(x) + skips.pop())
        return x


class RootParameters(Vocabulary):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.gates = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.position, self.scale = nn.Parameter(torch.randn(1, 8, WIDTH)), nn.Parameter(torch.tensor(0.5))

    def inside(self, x):
        x = x * self.scale + self.position[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x * self.gates[0])
        return x + self.gates[1]

    def expected(self):
        return list(self.layers)


class Wrapper(nn.Module):
    """A wrapper with a parameter, around a child that is called `model` and has parameters, too."""

    def __init__(self):
        super().__init__()
        self.scale, self.model = nn.Parameter(torch.tensor(5.0)), RootParameters()

    def forward(self, ids):
        return self.model(ids) * self.scale

    def expected(self):
        return list(self.model.layers)


class Plain(Vocabulary):
    """One Sequential of everything."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), Layer(), Layer(), Layer(), nn.Linear(WIDTH, WIDTH))

    def inside(self, x):
        return self.body(x)

    def expected(self):
        return list(self.body[1:4])


class SmallLists(EncoderDecoder):
    """Has, in addition to the layers, a list of heads, and a list with a
    layer that shares a matrix with the outside."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))
        self.shared = nn.ModuleList(Layer() for _ in range(2))
        self.shared[1].up.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.outside = nn.Linear(WIDTH, 2 * WIDTH)
        self.outside.weight = self.shared[0].up.weight

    def inside(self, x):
        for layer in self.shared:
            x = layer(x)
        x = super().inside(x)
        return x + sum(head(x).mean() for head in self.heads) + self.outside(x).mean()


MODELS = [EncoderDecoder, lambda: EncoderDecoder(experts=3), Towers, UNet, RootParameters, Wrapper, Plain, SmallLists]
NAMES = [
    "encoder and decoder",
    "experts in layers",
    "towers",
    "UNet",
    "root parameters",
    "wrapper",
    "Sequential",
    "small lists",
]


def made(kind, seed=0):
    torch.manual_seed(seed)
    return kind()


def data(count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (2, 6), generator=generator) for _ in range(count)]


def started(of, folder, way=StreamingEngine.start):
    return way(of, folder, groups(of), allocator=PageAlignedPinnedAllocator(Ledger(), lock=False))


@pytest.mark.parametrize("kind", MODELS, ids=NAMES)
def test_all_lists_of_layers_train_bitwise_as_in_memory(tmp_path, kind):
    ours, theirs = made(kind), made(kind)
    engine, optimizer = started(ours, tmp_path / "session"), AdamW(theirs.parameters(), **SETTINGS)
    for ids in data():
        ours(ids).backward()
        engine.finish_step()
        optimizer.zero_grad()
        theirs(ids).backward()
        optimizer.step()
    expected = dict(theirs.named_parameters())
    assert all(torch.equal(values, expected[name]) for name, values in engine.read_weights())
    engine.close()


@pytest.mark.parametrize(
    "kind",
    [EncoderDecoder, lambda: EncoderDecoder(experts=3), Towers, RootParameters, Wrapper, Plain],
    ids=["encoder-decoder", "experts", "towers", "root parameters", "wrapper", "plain"],
)
def test_the_layers_of_all_lists_are_found(kind):
    of = kind()
    assert find_blocks(of) == of.expected()


def test_called_stages_are_blocks_otherwise_their_parts_are():
    of = UNet()
    found = find_blocks(of)
    assert found == [*of.down, *of.up[0], *of.up[1]]


def test_small_lists_and_lists_sharing_a_parameter_stay_whole():
    of = SmallLists()
    assert find_blocks(of) == [*of.encoder.layers, *of.decoder.layers]


def test_modules_kept_whole_are_logged_once_with_their_size(tmp_path, caplog):
    of = EncoderDecoder()
    with caplog.at_level(logging.INFO, "memascend"):
        engine = started(of, tmp_path / "session")
    (said,) = [r.message for r in caplog.records if "in memory as a whole" in r.message]
    whole = [of.embedding, of.head, of.encoder.norm, of.decoder.norm]
    size = sum(p.numel() * 4 for module in whole for p in module.parameters()) / 2**20
    assert said.startswith("memascend: 5 blocks are streamed; head, embedding, encoder.norm and 1 more are in memory")
    assert said.endswith(f"{size:.1f} MiB")
    engine.close()


def test_store_begun_with_one_list_by_older_version_resumes(tmp_path):
    ours, ids = made(EncoderDecoder), data(1)[0]
    engine = StreamingEngine.start(
        ours,
        tmp_path / "session",
        groups(ours),
        blocks=largest_list(ours),
        allocator=PageAlignedPinnedAllocator(Ledger(), lock=False),
    )
    ours(ids).backward()
    engine.finish_step()
    expected = {name: values.clone() for name, values in engine.read_weights()}
    engine.close()
    again = made(EncoderDecoder, seed=4)
    engine, _ = started(again, tmp_path / "session", StreamingEngine.resume)
    assert engine.units.blocks == list(again.encoder.layers)
    assert all(torch.equal(values, expected[name]) for name, values in engine.read_weights())
    engine.close()


def test_single_layer_list_counts_if_there_is_no_other():
    """ALBERT has one layer, which it runs repeatedly."""
    of = RootParameters()
    of.layers = nn.ModuleList([nn.ModuleList([Layer()])])
    assert find_blocks(of) == [of.layers[0][0]]


def test_a_model_without_a_list_is_refused():
    with pytest.raises(NotStreamable, match="name the blocks"):
        find_blocks(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))


def test_a_block_without_a_forward_pass_is_refused():
    of = UNet()
    with pytest.raises(NotStreamable, match=r"the block up\.0 \(ModuleList\) has no forward pass: name its children"):
        ModelUnits(of, [of.up[0]])
