"""Commands for whoever runs an installation: what stands how, what is wrong, back up, restore, upgrade, and a chat.

Each works on what ``up`` runs, on a folder of it that is stopped, and on services that read the environment.
"""
