"""Every change to the registry of nodes: one function each, called by REST, admin pages, tasks and sockets alike."""
