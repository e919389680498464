"""Documents from files, folders and datasets, and the tokenizer that converts them to ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.integrations.byte_pairs import ALPHABET, END_OF_TEXT, train_byte_pairs
from memascend.suggestions import did_you_mean

if TYPE_CHECKING:
    import torch

TRAINED_VOCABULARY = 16_384  # ids of a tokenizer trained here, unless the model's embedding is smaller
_TRAINED_ON_BYTES = 50_000_000  # text on which a tokenizer is trained; more changes little and takes minutes


_SURROGATE = re.compile("[\ud800-\udfff]")


class Documents:
    """The documents of `sources`, which may be iterated repeatedly. `skipped` names files that are not UTF-8 text.

    A source is a text file, a .jsonl file (the field `field` of each line), a folder (the files that match `pattern`,
    sorted, without hidden ones), or the name of a dataset. Raises ValueError, in one line, for a source that is none of
    these.
    """

    def __init__(self, sources: list[str], *, pattern: str, field: str, subset: str | None, split: str) -> None:
        self._pattern, self._field, self._subset, self._split = pattern, field, subset, split
        self.skipped: list[str] = []
        self._paths: list[Path] = []
        self._dataset: Any = None
        for source in sources:
            path = Path(source).expanduser()
            if path.is_file():
                self._paths.append(path)
            elif path.is_dir():
                self._paths += self._files(path)
            elif path.is_symlink():
                raise ValueError(f"{source} is a link to {path.readlink()}, which is not there; name text with --data")
            elif len(sources) == 1 and not source.startswith(("/", ".", "~")) and not _near(path):
                self._dataset = self._load(source)
            else:
                raise ValueError(f"there is no file or folder {source}{_near(path)}; name text with --data")

    def _files(self, folder: Path) -> list[Path]:
        """Return the sorted files of a folder that match the pattern. Raises ValueError if none does."""
        found = [
            path
            for path in sorted(folder.rglob(self._pattern))
            if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        ]
        if not found:
            raise ValueError(f"the folder {folder} holds no file that matches '{self._pattern}' (--files)")
        return found

    def _load(self, name: str) -> Any:
        """Load a dataset by its name. Raises ValueError, in one line, if it cannot be loaded or lacks the field."""
        import datasets

        datasets.disable_progress_bars()
        try:
            loaded = datasets.load_dataset(name, self._subset, split=self._split)
        except (ConnectionError, FileNotFoundError, OSError, ValueError) as error:
            why = re.sub(r" \(\w+Error\)", "", " ".join(str(error).split()))[:200]
            raise ValueError(
                f"there is no file or folder {name}; taken as the name of a Hugging Face dataset, it cannot be loaded "
                f"either ({why}); name text with --data"
            ) from None
        if self._field not in loaded.column_names:
            raise ValueError(
                f"the dataset {name} has no field '{self._field}'; name one of {', '.join(loaded.column_names)} with "
                "--text-field"
            )
        return loaded

    def __iter__(self) -> Iterator[str]:
        self.skipped = []
        if self._dataset is not None:
            for row in self._dataset:
                if row[self._field]:
                    yield row[self._field]
        for path in self._paths:
            yield from self._read(path)

    def _read(self, path: Path) -> Iterator[str]:
        """Yield the documents of a file; one that is not UTF-8 text is skipped and noted in `skipped`."""
        if path.suffix == ".jsonl":
            yield from self._lines(path)
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            self.skipped.append(str(path))
            return
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from None
        if "\0" in text:
            self.skipped.append(str(path))
        elif text:
            yield text

    def _lines(self, path: Path) -> Iterator[str]:
        """Yield the documents of a .jsonl file. Raises ValueError, with the line's number, for a line without a
        text."""
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[self._field]
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{path}, line {number}: not a JSON object with the field '{self._field}' (--text-field)"
                    ) from None
                if not isinstance(text, str):
                    raise ValueError(f"{path}, line {number}: the field '{self._field}' is not a text")
                if not text.isascii() and _SURROGATE.search(text):
                    raise ValueError(
                        f"{path}, line {number}: half of a surrogate pair, which is no character; remove it"
                    )
                if text:
                    yield text


def _near(path: Path) -> str:
    """Return a hint that names a sibling of a missing path with nearly the same name, or an empty string."""
    names = [each.name for each in path.absolute().parent.iterdir()] if path.absolute().parent.is_dir() else []
    return did_you_mean(path, (str(path.with_name(name)) for name in names), cutoff=0.75)


# Files from which tokenizers are loaded. From a folder without any, transformers 5 makes one with an empty vocabulary.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(source: Path, folder: Path) -> bool:
    """Save the tokenizer of the folder `source` to `folder`; return False if `source` has none."""
    from transformers.utils import logging

    if not any((source / name).is_file() for name in _TOKENIZER_FILES):
        return False
    logging.set_verbosity_error()
    _tokenizer(source).save_pretrained(folder)
    return True


def _tokenizer(folder: Path) -> Any:
    """Load the tokenizer of a folder. Raises ValueError, in one line, if it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"the tokenizer in {folder} cannot be loaded: {' '.join(str(error).split())[:200]}") from None


def train_tokenizer(documents: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE of at most `vocabulary` ids on the first 50 million characters; save it to `folder`.

    Raises ValueError, in one line, for a vocabulary that is too small for a byte tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    if vocabulary < ALPHABET + 1:
        raise ValueError(
            f"the model's vocabulary of {vocabulary} ids is too small for a byte tokenizer ({ALPHABET + 1}); use a "
            "smaller --twin, or name a --tokenizer"
        )
    texts = _first_bytes(documents, _TRAINED_ON_BYTES)
    tokenizer = train_byte_pairs(texts, min(vocabulary, TRAINED_VOCABULARY))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    wrapped.save_pretrained(folder)


def _first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Yield documents until they have `limit` characters in total; the last one is not cut."""
    seen = 0
    for text in documents:
        yield text
        seen += len(text)
        if seen >= limit:
            return


class Encoder:
    """Converts documents to ids, with the end-of-text id after each document if the tokenizer has one."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = _tokenizer(folder)
        self._tokenizer.model_max_length = 10**12  # documents are cut by packing, not by the tokenizer
        self.size = len(self._tokenizer)
        end = self._tokenizer.eos_token_id
        self.end: list[int] = [] if end is None else [int(end)]

    def __call__(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [ids + self.end for ids in encoded]


def go_on(
    model: Any,
    tokenizer_folder: Path,
    prompt: str,
    tokens: int,
    device: torch.device,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> int:
    """Print `prompt` and at most `tokens` tokens generated by `model`, as they come; return how many were generated.

    `temperature` 0 takes the likeliest token; any other value samples, seeded by `seed`. Raises ValueError for an empty
    prompt if the tokenizer has no start token, and if prompt and tokens exceed the model's positions.
    """
    import torch
    from transformers import TextStreamer

    tokenizer = _tokenizer(tokenizer_folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if begin is None:
            raise ValueError("the prompt is empty, and the tokenizer has no start token: give some text")
        ids = torch.tensor([[begin]])
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions and ids.shape[1] + tokens > positions:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, and with {tokens} more (--tokens) they are more than the model's "
            f"{positions} positions"
        )
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    torch.manual_seed(seed)
    ids = ids.to(device)
    found = model.eval().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **sampling,
    )
    return int(found.shape[1] - ids.shape[1])
