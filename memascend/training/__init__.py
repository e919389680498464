"""`memascend train`: a fine-tuning run from a command to a folder that transformers loads.

The parent process (:mod:`.launch`) stays small: it reads the configuration, prepares data in a child, starts one
process a rank (:mod:`.worker`), forwards signals and cleans up. All that a run makes is in its output folder
(:mod:`.folder`).
"""
