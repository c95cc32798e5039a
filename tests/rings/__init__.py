"""Real processes, real time: what takes whole servers, engines, browsers, kills or minutes."""
