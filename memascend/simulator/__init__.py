"""Simulation of a training step as a graph of tasks on a described machine. Imports no torch.

machine = ResourceModel(name="C1", resources={"gpu": Fifo(rate=340e12), "ssd": Drive(read=14e9, write=9.5e9)},
                  pools={"buffers": 2})
tasks = [Task(name="read 0", phase="forward", needs={"ssd.read": 1e9}, takes={"buffers": 1}),
         Task(name="block 0", phase="forward", needs={"gpu": 4e12}, after=("read 0",), gives={"buffers": 1})]
simulated = simulate(tasks, machine)
simulated.seconds, simulated.busy("forward")
"""

from memascend.simulator.calibration import Calibration
from memascend.simulator.machine import Drive, Fifo, ResourceModel, Shared
from memascend.simulator.recorder import Recorder
from memascend.simulator.simulate import SimulationResult, roofline_s, simulate
from memascend.simulator.tasks import Task
from memascend.simulator.trace import Event, read_trace, write_trace

__all__ = [
    "Calibration",
    "Drive",
    "Event",
    "Fifo",
    "Recorder",
    "ResourceModel",
    "Shared",
    "SimulationResult",
    "Task",
    "read_trace",
    "roofline_s",
    "simulate",
    "write_trace",
]
