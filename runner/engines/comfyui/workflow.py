"""The graph that makes an image: the owner's template or one of our own, filled in for each request. Pure.

A template is a graph in the format that ComfyUI exports for its API, with ``{{prompt}}`` and its like in its values. A value
that is nothing but a placeholder gets the number or text itself; inside a longer text, its characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from runner.errors import EngineError
from runner.limits import limits
from wire.unreadable import UNREADABLE

LOADER = "CheckpointLoaderSimple"
PREVIEW = "PreviewAny"
PLACEHOLDERS = (
    "prompt", "negative_prompt", "width", "height", "seed", "steps", "cfg", "batch_size", "checkpoint",
)  # fmt: skip

Value = str | int | float
Graph = dict[str, object]
"""Node id to ``{"class_type": …, "inputs": {…}}``."""

_PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_]+)\s*\}\}")


class _Node(msgspec.Struct):
    class_type: str
    inputs: dict[str, object] = {}


_nodes_decoder = msgspec.json.Decoder(dict[str, object])


@dataclass(frozen=True, slots=True)
class Workflow:
    """A template. ``placeholders`` are those it uses, ``node_types`` the kinds of nodes it needs on the server.

    ``checkpoint_inputs``: kinds of nodes and their inputs that get the checkpoint's name.
    """

    graph: Graph
    placeholders: frozenset[str]
    node_types: tuple[str, ...]
    checkpoint_inputs: tuple[tuple[str, str], ...]

    def fill(self, values: Mapping[str, Value]) -> Graph:
        """Return the graph with every placeholder replaced; ``values`` has them all."""
        return {node_id: _fill(node, values) for node_id, node in self.graph.items()}


def read_workflow(data: bytes) -> Workflow:
    """Return the template in a file's bytes. Raises EngineError saying what is wrong with it."""
    if len(data) > limits().comfyui.workflow_bytes:
        raise EngineError(f"comfyui_workflow has more than {limits().comfyui.workflow_bytes} bytes: that is no workflow")
    try:
        graph = _nodes_decoder.decode(data)
        if isinstance(graph.get("nodes"), list):
            raise EngineError("comfyui_workflow is in the format of ComfyUI's editor: export it with Export (API)")
        workflow = _examine(graph)
    except msgspec.ValidationError as error:
        raise EngineError(f"comfyui_workflow is not a graph for ComfyUI's API: {error}") from None
    except UNREADABLE:
        raise EngineError("comfyui_workflow is not JSON: export it with Export (API)") from None
    unknown = sorted(workflow.placeholders - set(PLACEHOLDERS))
    if unknown:
        raise EngineError(f"comfyui_workflow has placeholders that nothing fills: {', '.join(unknown)}; known: {_listed()}")
    if "prompt" not in workflow.placeholders:
        raise EngineError("comfyui_workflow has no {{prompt}}, so every request would make the same image")
    return workflow


def make_text_to_image() -> Workflow:
    """Return a template of standard nodes. Its images go to the server's temporary folder, which it clears by itself."""
    clip, checkpoint = ["checkpoint", 1], "{{checkpoint}}"
    return _examine(
        {
            "checkpoint": _node(LOADER, ckpt_name=checkpoint),
            "positive": _node("CLIPTextEncode", text="{{prompt}}", clip=clip),
            "negative": _node("CLIPTextEncode", text="{{negative_prompt}}", clip=clip),
            "latent": _node("EmptyLatentImage", width="{{width}}", height="{{height}}", batch_size="{{batch_size}}"),
            "sampler": _node(
                "KSampler", model=["checkpoint", 0], positive=["positive", 0], negative=["negative", 0],
                latent_image=["latent", 0], seed="{{seed}}", steps="{{steps}}", cfg="{{cfg}}", sampler_name="euler",
                scheduler="normal", denoise=1.0,
            ),
            "decode": _node("VAEDecode", samples=["sampler", 0], vae=["checkpoint", 2]),
            "image": _node("PreviewImage", images=["decode", 0]),
        }
    )  # fmt: skip


def make_warm_up(checkpoint: str, *, has_preview: bool) -> Graph:
    """Return the smallest graph that has the server read a checkpoint.

    ComfyUI runs only what leads to an output, which is why the loader alone may be refused.
    """
    graph: Graph = {"checkpoint": _node(LOADER, ckpt_name=checkpoint)}
    if has_preview:
        graph["output"] = _node(PREVIEW, source=["checkpoint", 0])
    return graph


def _examine(graph: Graph) -> Workflow:
    """Return what a graph is made of. Raises msgspec.ValidationError when it is none."""
    if not 1 <= len(graph) <= limits().comfyui.workflow_nodes:
        raise msgspec.ValidationError(f"a graph has 1 to {limits().comfyui.workflow_nodes} nodes, not {len(graph)}")
    nodes = [msgspec.convert(node, _Node) for node in graph.values()]
    found = {name for node in nodes for text in _texts(node.inputs) for name in _PLACEHOLDER.findall(text)}
    takes = [
        (node.class_type, name)
        for node in nodes
        for name, value in node.inputs.items()
        if isinstance(value, str) and (match := _PLACEHOLDER.fullmatch(value)) and match[1] == "checkpoint"
    ]
    return Workflow(
        graph=graph,
        placeholders=frozenset(found),
        node_types=tuple(sorted({node.class_type for node in nodes})),
        checkpoint_inputs=tuple(dict.fromkeys(takes)),
    )


def _texts(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for item in value.values():
                yield from _texts(item)


def _fill(value: object, values: Mapping[str, Value]) -> object:
    match value:
        case str():
            if match := _PLACEHOLDER.fullmatch(value):
                return values[match[1]]
            # One pass: what a prompt says in braces is not looked at again.
            return _PLACEHOLDER.sub(lambda found: str(values[found[1]]), value)
        case list():
            return [_fill(item, values) for item in value]
        case dict():
            return {name: _fill(item, values) for name, item in value.items()}
        case _:
            return value


def _node(class_type: str, **inputs: object) -> dict[str, object]:
    return {"class_type": class_type, "inputs": inputs}


def _listed() -> str:
    return ", ".join(f"{{{{{name}}}}}" for name in PLACEHOLDERS)
