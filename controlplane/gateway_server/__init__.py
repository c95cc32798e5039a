"""The gateway's server: uvicorn with the deadlines, limits and connection handles that the relay needs."""
