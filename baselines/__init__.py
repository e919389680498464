"""The systems, one folder for each: policy, configuration and description. Mechanisms are in ``memascend``.

The package is `memascend.baselines`: `memascend/baselines` is a link to this folder, and a wheel holds the files under
that path.
"""
