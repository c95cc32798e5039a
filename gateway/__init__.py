"""The client-facing API: keys, tenants, admission, queue, dispatch, relay, records."""
