"""An agent written from the central-server document alone: it registers, reports, obeys, and serves requests at its endpoint.

    python examples/metalyard_agent.py --central http://127.0.0.1:8080 --token msw_... --model tiny --engine http://127.0.0.1:9000

It needs websockets and httpx, and an engine with the OpenAI API. Without a socket it falls back to HTTP polling.
"""

import argparse
import json
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect


class Agent:
    def __init__(self, options):
        self.options = options
        self.loaded, self.active, self.draining = [options.model], 0, False
        self.http = httpx.Client(timeout=60)

    def register(self):
        port = self.options.port
        body = {
            "agent_id": self.options.agent_id,
            "agent_version": "1.2.0",
            "auth_token": self.options.token,
            "platform": {"os": "linux", "os_version": "Debian 12", "arch": "x86_64"},
            "gpus": [{"gpu_id": "gpu-0", "vendor": "nvidia", "model": "RTX 4090", "vram_mb": 24576, "status": "available"}],
            "models_available": [{"model_id": self.options.model, "quantization": "q8_0", "loaded": True}],
            "network": {"endpoint": f"{self.options.host}:{port}", "nat_type": "none", "public_ip": "auto-detect"},
            "capacity": {"max_concurrent_requests": 2, "max_context_tokens": 2048},
        }
        answer = self.http.post(f"{self.options.central}/api/v1/register", json=body)
        answer.raise_for_status()
        said = answer.json()
        print("registered as", said["node_id"], "warnings:", said["config"]["warnings"], flush=True)
        return said["session_id"], said["heartbeat_interval"]

    def heartbeat(self):
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        gpu = {"gpu_id": "gpu-0", "load_percent": 45, "vram_used_mb": 8200, "temperature_c": 68, "active_requests": self.active}
        return {"type": "heartbeat", "timestamp": now, "gpu_states": [gpu], "models_loaded": self.loaded, "queue_depth": 0}

    def obey(self, command):
        name, params = command["command"], command["params"]
        print("command", name, {key: value for key, value in params.items() if key != "verifiedOpToken"}, flush=True)
        if name == "load_model":
            self.loaded = sorted({*self.loaded, params["model_id"]})
        elif name == "evict_model":
            self.loaded = [model for model in self.loaded if model != params["model_id"]]
        self.draining = name in ("drain", "shutdown")
        return {"type": "command_status", "command_id": command["command_id"], "state": "succeeded", "progress": 1.0}

    def run(self):
        while not self.draining or self.active:
            session_id, interval_s = self.register()
            try:
                self.hold_socket(session_id, interval_s)
            except (WebSocketException, OSError) as error:
                print("socket:", error, flush=True)
                try:
                    self.poll(session_id, interval_s)
                except httpx.HTTPError as failure:
                    print("polling:", failure, flush=True)
                    time.sleep(2)

    def hold_socket(self, session_id, interval_s):
        if self.options.poll:
            raise OSError("polling was asked for")
        url = f"{self.options.central.replace('http', 'ws', 1)}/api/v1/session/{session_id}"
        with connect(url) as socket:
            print("socket open", flush=True)
            while not self.draining or self.active:
                socket.send(json.dumps(self.heartbeat()))
                due = time.monotonic() + interval_s
                while (left_s := due - time.monotonic()) > 0:
                    try:
                        message = json.loads(socket.recv(timeout=left_s))
                    except TimeoutError:
                        break
                    if message["type"] == "command":
                        socket.send(json.dumps(self.obey(message)))

    def poll(self, session_id, interval_s):
        url = f"{self.options.central}/api/v1/session/{session_id}"
        while not self.draining or self.active:
            answer = self.http.post(url, params={"wait": interval_s}, json=self.heartbeat())
            answer.raise_for_status()
            for command in answer.json()["commands"]:
                self.http.post(url, json=self.obey(command)).raise_for_status()

    def serve(self):
        agent = self

        class Endpoint(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.pass_on("GET", b"")

            def do_POST(self):
                self.pass_on("POST", self.rfile.read(int(self.headers.get("content-length") or 0)))

            def pass_on(self, method, body):
                agent.active += method == "POST"
                try:
                    headers = {"content-type": "application/json"}
                    with agent.http.stream(method, agent.options.engine + self.path, content=body, headers=headers) as answer:
                        self.send_response(answer.status_code)
                        self.send_header("content-type", answer.headers.get("content-type", "application/json"))
                        self.send_header("connection", "close")
                        self.end_headers()
                        for part in answer.iter_raw():
                            self.wfile.write(part)
                            self.wfile.flush()
                except BrokenPipeError:
                    pass  # whoever asked is gone
                finally:
                    agent.active -= method == "POST"
                    self.close_connection = True

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer((self.options.host, self.options.port), Endpoint)
        threading.Thread(target=server.serve_forever, daemon=True).start()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--central", required=True, help="URL of a gateway")
    parser.add_argument("--token", required=True, help="a node credential, msw_...")
    parser.add_argument("--engine", required=True, help="URL of an engine with the OpenAI API")
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--agent-id", default=str(uuid.uuid5(uuid.NAMESPACE_DNS, Path("/etc/hostname").read_text().strip())))
    parser.add_argument("--poll", action="store_true", help="report over HTTP alone")
    options = parser.parse_args()
    agent = Agent(options)
    agent.serve()
    agent.run()
