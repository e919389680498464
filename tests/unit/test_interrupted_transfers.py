"""Ctrl-C between the end of a transfer and its bookkeeping: no waiter hangs, and closing is no error."""

import threading

import pytest
import torch

from memascend.storage import engine_requests
from memascend.storage.completion import RequestCancelled
from memascend.storage.direct_engine import DirectEngineConfig
from memascend.storage.engine_tiers import DirectTier


class Interrupting:
    """An engine of which one call is interrupted as it returns."""

    def __init__(self, engine, name):
        self._engine, self._name = engine, name

    def __getattr__(self, name):
        found = getattr(self._engine, name)
        if name != self._name:
            return found

        def call(*arguments):
            result = found(*arguments)
            if name == "take_ended" and not result:
                return result
            self._name = None
            raise KeyboardInterrupt

        return call


def done(read):
    while not read.done():
        pass


ASKED = {"wait": lambda read: read.wait(), "take_ended": done}


@pytest.fixture
def tier(tmp_path):
    tier = DirectTier.in_file(tmp_path, "tests", DirectEngineConfig(control_folder=str(tmp_path)))
    yield tier
    tier.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ASKED)
def test_transfer_whose_outcome_is_lost_ends_as_cancelled(tier, monkeypatch, name):
    tier.write("a", torch.ones(5000)).wait()
    requests = tier._all[0]
    out = torch.zeros(5000)
    read = tier.read("a", out)
    with monkeypatch.context() as during:
        during.setattr(requests, "engine", Interrupting(requests.engine, name))
        with pytest.raises(KeyboardInterrupt):
            ASKED[name](read)
    with pytest.raises(RequestCancelled, match="an interrupt came"):
        read.wait()
    tier.read("a", out).wait()
    assert torch.equal(out, torch.ones(5000))


@pytest.mark.timeout(60)
def test_another_waiting_thread_also_gets_the_cancellation(tier, monkeypatch):
    monkeypatch.setattr(engine_requests, "_LOST_S", 0.05)
    tier.write("a", torch.ones(5000)).wait()
    requests, read, errors = tier._all[0], tier.read("a", torch.zeros(5000)), []
    with monkeypatch.context() as during:
        during.setattr(requests, "engine", Interrupting(requests.engine, "wait"))
        with pytest.raises(KeyboardInterrupt):
            read.wait()

    def wait():
        try:
            read.wait()
        except RequestCancelled as error:
            errors.append(error)

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert len(errors) == 1


@pytest.mark.timeout(60)
def test_interrupted_submission_causes_no_error_at_close(tier, monkeypatch):
    with monkeypatch.context() as during:
        during.setattr(tier._all[0], "engine", Interrupting(tier._all[0].engine, "take_ended"))
        during.setattr(tier, "engine", Interrupting(tier.engine, "write"))
        with pytest.raises(KeyboardInterrupt):
            tier.write("a", torch.ones(5000))
    tier.write("b", torch.ones(100)).wait()


@pytest.mark.timeout(60)
def test_half_settled_transfer_ends_as_cancelled(tier, monkeypatch):
    written = tier.write("a", torch.ones(5000))
    with monkeypatch.context() as during:
        during.setattr(type(written), "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            written.wait()
    with pytest.raises(RequestCancelled, match="an interrupt came"):
        written.wait()


def interrupted(*_, **__):
    raise KeyboardInterrupt
