"""A training step as a graph of tasks, played on a described machine. Imports no torch.

machine = Machine(name="C1", resources={"gpu": Fifo(rate=340e12), "ssd": Drive(read=14e9, write=9.5e9)},
                  pools={"buffers": 2})
tasks = [Task(name="read 0", phase="forward", needs={"ssd.read": 1e9}, takes={"buffers": 1}),
         Task(name="block 0", phase="forward", needs={"gpu": 4e12}, after=("read 0",), gives={"buffers": 1})]
played = play(tasks, machine)
played.seconds, played.busy("forward")
"""

from memascend.simulator.calibration import Calibration
from memascend.simulator.machine import Drive, Fifo, Machine, Shared
from memascend.simulator.play import Played, play, roofline_s
from memascend.simulator.recorder import Recorder
from memascend.simulator.tasks import Task
from memascend.simulator.trace import Event, read_trace, write_trace

__all__ = [
    "Calibration",
    "Drive",
    "Event",
    "Fifo",
    "Machine",
    "Played",
    "Recorder",
    "Shared",
    "Task",
    "play",
    "read_trace",
    "roofline_s",
    "write_trace",
]
