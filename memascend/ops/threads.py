"""Control of the number of threads that kernels use, beyond torch's own settings."""

from memascend import _C


def compute_alone() -> None:
    """Make all later kernels that this thread calls, torch's and ours, run on this thread alone.

    Meant for a thread that computes while another one runs matrix products. OpenMP gives each thread that distributes
    work a team of its own. With two teams there are more threads than cores, and libgomp then lets all of them sleep
    after each kernel instead of spinning until the next: on two cores a training step took a third longer, whichever
    thread had the second team.
    """
    _C.compute_alone()


def end_team() -> None:
    """Release this thread's OpenMP team; the next kernel gets a new one.

    Meant for threads that compute in turn: only the active one has a team, so that there are no more threads than
    cores.
    """
    _C.end_team()
