"""One folder a system: policy, configuration and description. Mechanisms live in ``memascend``.

The package is `memascend.baselines`: `memascend/baselines` is a link to this folder, and a wheel holds the files there.
"""
