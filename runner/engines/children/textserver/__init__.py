"""The HTTP server that a text library gets in its child process: OpenAI's chat and completions over a narrow port.

``model`` is the port, ``app`` the server; the rest is what lies between: fields of a request, the chat template, pieces of
text, worker threads, and the shapes of answers.
"""
