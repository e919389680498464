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
