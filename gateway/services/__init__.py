"""Changes to tenants, client keys, models and aliases, and what pages read of them and of requests.

Each function is atomic, writes its audit event in the same transaction and publishes a hint once it is committed.
"""
