"""`memascend bench latency`: what it refuses, and its result for each size."""

import json

from memascend.cli import main


def test_every_size_is_timed_in_every_round(capsys):
    assert main(["bench", "latency", "--kib", "16,4096", "--repeats", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    small, large = [row for row in result["summary"] if row["node"] == 0]
    assert (small["bytes"], large["bytes"]) == (16 << 10, 4 << 20)
    assert all(len(point["seconds"]) == 3 and min(point["seconds"]) > 0 for point in result["points"])


def test_oversized_buffer_is_refused_in_one_line(capsys):
    assert main(["bench", "latency", "--kib", "100000000"]) == 2
    out = capsys.readouterr().err.strip()
    assert out.startswith("memascend: error: --kib: 100000000 KiB exceed")
    assert "\n" not in out
