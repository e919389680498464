"""How many threads a kernel takes, where that is not for torch to say."""

from memascend import _C


def compute_alone() -> None:
    """Kernels that this thread calls, torch's and ours, take no other thread from here on.

    For a thread that computes beside another one's products: OpenMP gives each thread that shares work out a team of
    its own. With two teams there are more threads than cores, and libgomp then lets all of them sleep after each
    kernel in place of waiting for the next: on two cores a training step took a third longer, whoever had the second
    team.
    """
    _C.compute_alone()


def end_team() -> None:
    """Let go of the threads that share this thread's kernels; the next kernel gets new ones.

    For threads that compute in turn: only the one at work has a team, so that there are no more threads than cores.
    """
    _C.end_team()
