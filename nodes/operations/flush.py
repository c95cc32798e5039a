"""Flushing of caches on nodes: all, of a model, of a tenant or of a tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, gettext_noop

from governance.errors import InvalidProposal
from governance.registry import Choices, Impact, Line
from nodes.operations.targets import (
    CAUTION,
    DANGER,
    OK,
    Field,
    NodeOperation,
    Option,
    Params,
    Target,
    find_places,
    judge_live,
    list_targets,
    offer,
    offer_models,
)

SCOPES = {
    "tag": gettext_lazy("what carries a tag"),
    "tenant": gettext_lazy("one tenant"),
    "model": gettext_lazy("one model"),
    "all": gettext_lazy("everything"),
}
"""By what is signed, in the order in which the page lists them."""
_NEEDED_BY_SCOPE = {"model": "modelId", "tenant": "tenantId", "tag": "tag"}


class CacheFlush(NodeOperation):
    """Flush caches: all, of a model, of a tenant or of a tag."""

    name = "cache-flush"
    title = gettext_noop("Flush caches")
    fields: Mapping[str, Field] = {
        "scope": Field("text", is_required=True),
        "tenantId": Field("text"),
        "modelId": Field("text"),
        "tag": Field("text"),
    }

    def clean_params(self, params: Params) -> dict[str, object]:
        """Return the members of a flush, with what its scope needs. Raises InvalidProposal."""
        cleaned = super().clean_params(params)
        scope = str(cleaned["scope"])
        if scope not in SCOPES:
            raise InvalidProposal(_("scope must be one of all, model, tenant, tag."), param="scope")
        needed = _NEEDED_BY_SCOPE.get(scope)
        if needed is not None and needed not in cleaned:
            raise InvalidProposal(_("The scope %(scope)s needs %(needed)s.") % {"scope": scope, "needed": needed}, param=needed)
        allowed = {"scope", "modelId", needed} | ({"tenantId"} if scope == "tag" else set())
        extra = sorted(cleaned.keys() - allowed)
        if extra:
            raise InvalidProposal(
                _("The scope %(scope)s makes no use of %(extra)s; leave it out.") % {"scope": scope, "extra": extra[0]},
                param=extra[0],
            )
        return cleaned

    def choices(self) -> Choices:
        """Return what a flush offers: its scope, and the names that a scope needs."""
        targets = list_targets()
        scopes: list[Option] = [("", _("Choose…")), *((scope, str(label)) for scope, label in SCOPES.items())]
        model = offer_models(find_places(targets), blank=_("any"))
        params: list[Mapping[str, object]] = [
            {"name": "scope", "label": _("What to flush"), "kind": "select", "choices": scopes},
            {**model, "required": False, "help": _("Needed for one model; narrows a tenant or a tag.")},
            {"name": "tenantId", "label": _("Tenant"), "required": False, "help": _("Needed for one tenant; narrows a tag.")},
            {"name": "tag", "label": _("Tag"), "required": False, "help": _("Needed for what carries a tag.")},
        ]
        return offer(targets, is_remote=True, params=params)

    def write_sentence(self, params: Params, nodes: str) -> str:
        model, tenant, scope = params.get("modelId"), params.get("tenantId"), params.get("scope")
        said = {"model": model, "tenant": tenant, "tag": params.get("tag"), "nodes": nodes}
        if scope == "model":
            return _("Flush the cache of model %(model)s on %(nodes)s") % said
        if scope == "tenant" and model:
            return _("Flush the cache of tenant %(tenant)s of model %(model)s on %(nodes)s") % said
        if scope == "tenant":
            return _("Flush the cache of tenant %(tenant)s on %(nodes)s") % said
        if scope == "tag" and tenant and model:
            return _("Flush the cache tagged %(tag)s of tenant %(tenant)s of model %(model)s on %(nodes)s") % said
        if scope == "tag" and tenant:
            return _("Flush the cache tagged %(tag)s of tenant %(tenant)s on %(nodes)s") % said
        if scope == "tag" and model:
            return _("Flush the cache tagged %(tag)s of model %(model)s on %(nodes)s") % said
        if scope == "tag":
            return _("Flush the cache tagged %(tag)s on %(nodes)s") % said
        return (_("Flush all caches of model %(model)s on %(nodes)s") if model else _("Flush all caches on %(nodes)s")) % said

    def write_lines(self, params: Params, found: Sequence[Target]) -> list[Line]:
        labels = {"scope": _("Scope"), "tenantId": _("Tenant"), "modelId": _("Model"), "tag": _("Tag")}
        return [Line(label, str(params[field])) for field, label in labels.items() if field in params]

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        model, name = params.get("modelId"), target.node.name
        if params.get("scope") == "all":
            text = _("The caches of every tenant on %(node)s are emptied; their next requests are slower.")
            yield Impact(DANGER, text % {"node": name})
        if isinstance(model, str) and model not in target.loaded:
            yield Impact(CAUTION, _("%(model)s is not loaded on %(node)s.") % {"model": model, "node": name})
        elif not target.loaded:
            yield Impact(OK, _("No model is loaded on %(node)s.") % {"node": name})
        else:
            fate = _("Some engines refuse while they run.")
            yield from judge_live(target, model if isinstance(model, str) else None, fate=fate)


CACHE_FLUSH = CacheFlush()
