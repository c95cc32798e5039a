"""Programs that run as child processes, one engine each. None of them imports the rest of the runner's code."""
