"""A client that takes its requests to a node itself where it can, and else asks the gateway. It needs httpx alone.

    client = TicketClient("http://127.0.0.1:8080", "mst_...")
    for text in client.stream("muster-tiny", [{"role": "user", "content": "Hello"}]):
        print(text, end="")

As a program: python examples/ticket_client.py --gateway http://127.0.0.1:8080 --key mst_... --model muster-tiny "Hello"
"""

import argparse
import json
import sys

import httpx


class Interrupted(Exception):
    """The answer broke off after some of it had come; what came was yielded."""


class TicketClient:
    """``direct``: how many requests went to nodes, ``relayed``: how many through the gateway."""

    def __init__(self, gateway, key, *, timeout_s=300.0):
        self.gateway = gateway.rstrip("/").removesuffix("/v1")
        self.headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(timeout=httpx.Timeout(timeout_s, connect=5.0))
        self.direct = self.relayed = 0

    def stream(self, model, messages, *, max_tokens=512, **fields):
        """Yield the text of an answer as it comes. Raises Interrupted, httpx.HTTPStatusError.

        A node that cannot be reached, or is lost before its first word, costs a second try at most: then the gateway relays.
        """
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True, **fields}
        for _ in range(2):
            ticket = self.ask(model, messages, max_tokens)
            if ticket is None:
                break
            has_begun = False
            direct = {"authorization": f"Bearer {ticket['ticket']}"}
            try:
                for text in self._read(ticket["base_url"], direct, {**body, "model": ticket["model"]}):
                    self.direct += not has_begun
                    has_begun = True
                    yield text
            except (httpx.HTTPError, Interrupted) as error:
                if has_begun:  # another node knows nothing of what was said, so whoever reads it begins anew
                    raise Interrupted(str(error)) from error
                continue
            self.direct += not has_begun
            return
        self.relayed += 1
        yield from self._read(f"{self.gateway}/v1", self.headers, body)

    def ask(self, model, messages, max_tokens):
        """Return a ticket, or None where the gateway is to be asked."""
        size = sum(len(str(message.get("content", ""))) for message in messages)
        wish = {"model": model, "max_tokens": max_tokens, "prompt_tokens_est": size // 4}
        answer = self.http.post(f"{self.gateway}/v1/tickets", json=wish, headers=self.headers)
        answer.raise_for_status()
        return answer.json() if answer.status_code == 201 else None

    def _read(self, base_url, headers, body):
        with self.http.stream("POST", f"{base_url}/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                answer.read()
                answer.raise_for_status()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if not line.startswith("data: "):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Interrupted(chunk["error"]["message"])
                for choice in chunk.get("choices", []):
                    if text := choice.get("delta", {}).get("content"):
                        yield text
        raise Interrupted("the stream ended without its end")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateway", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("prompt")
    options = parser.parse_args()
    client = TicketClient(options.gateway, options.key)
    messages = [{"role": "user", "content": options.prompt}]
    for text in client.stream(options.model, messages, max_tokens=options.max_tokens):
        sys.stdout.write(text)
        sys.stdout.flush()
    sys.stdout.write(f"\n({'from the node itself' if client.direct else 'through the gateway'})\n")


if __name__ == "__main__":
    main()
