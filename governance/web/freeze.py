"""Stopping everything at once."""

from __future__ import annotations

from http import HTTPStatus

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from governance.errors import GovernanceError
from governance.operations import freezes
from governance.web.frame import approval_page, find_viewer, render_page


@require_http_methods(["GET", "HEAD", "POST"])
@approval_page
def freeze(request: HttpRequest) -> HttpResponse:
    """Ask on GET, freeze on POST."""
    reason, problem = request.POST.get("reason", ""), ""
    if request.method == "POST":
        try:
            freezes.freeze(user=find_viewer(request), reason=reason)
        except GovernanceError as error:
            problem = error.message
        else:
            messages.success(request, "Everything is frozen.")
            return HttpResponseRedirect(reverse("approvals:inbox"), status=HTTPStatus.SEE_OTHER)
    status = HTTPStatus.CONFLICT if problem else HTTPStatus.OK
    return render_page(request, "approvals/freeze.html", {"reason": reason, "problem": problem}, status=status)
