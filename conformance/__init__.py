"""What clients require of the API, as a table of small checks that run against any base URL (``./muster conformance``)."""
