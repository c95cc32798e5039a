"""Our Django database backend, and the two ways to it beside the ORM: threads of an event loop, and the loop itself."""
