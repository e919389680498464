"""One folder a system: policy, configuration and description. Mechanisms live in ``memascend``."""
