"""`memascend train`: a fine-tuning run, from the command line to a model folder that transformers loads.

The parent process (:mod:`.launch`) stays small: it reads the configuration, prepares the data in a child process,
starts one process per rank (:mod:`.worker`), forwards signals and cleans up. Everything that a run produces is in its
output folder (:mod:`.folder`).
"""
