"""Every setting of Muster, read from the environment once. ``docs/settings.md`` lists the variables."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from controlplane.env import (
    LOG_FORMATS,
    check_issuer,
    collect_errors,
    raise_errors,
    read_address,
    read_bool,
    read_choice,
    read_database,
    read_int,
    read_issuer,
    read_limits,
    read_list,
    read_log_level,
    read_name,
    read_networks,
    read_path,
    read_role,
    read_roles,
    read_secret,
    read_text,
    read_valkey,
)
from core.issuer import Issuer
from core.limits import install
from gateway.values import RequestOutcome
from governance.states import ApprovalState, RunState
from wire.client_address import TrustedProxies
from wire.contract import NodeMode, NodeStatus, RequestState
from wire.logs import choose_format

BASE_DIR = Path(__file__).resolve().parent.parent

collect_errors()  # all that is wrong is said at the end of this module
DEBUG = read_bool("MUSTER_DEBUG", default=False)
SECRET_KEY = read_text("MUSTER_SECRET_KEY")
# Off in a process that never shows the admin site (gateway, worker): its modules are not even loaded then.
ADMIN_PAGES = read_bool("MUSTER_ADMIN_PAGES", default=True)
ALLOWED_HOSTS = read_list("MUSTER_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = read_list("MUSTER_CSRF_TRUSTED_ORIGINS")
DATABASE_URL = read_text("DATABASE_URL")
VALKEY = read_valkey("REDIS_URL")
REDIS_URL = VALKEY.url

INSTALLED_APPS = [
    "unfold.apps.BasicAppConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.humanize",
    "django.contrib.postgres",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    # Single sign-on: what it speaks with an issuer, and the accounts that people have there. None of its pages is mounted.
    # In every process: whichever migrates has to know their tables.
    "allauth.account",
    "allauth.socialaccount",
    "core.apps.CoreConfig",
    "governance.apps.GovernanceConfig",
    "nodes.apps.NodesConfig",
    "gateway.apps.GatewayConfig",
    "controlplane.apps.ControlplaneConfig",
    "controlplane.apps.MusterAdminConfig",
]

MIDDLEWARE = [
    "controlplane.metrics.CountingMiddleware",
    "controlplane.middleware.ContentSecurityPolicyMiddleware",
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "controlplane.middleware.LanguageMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "controlplane.middleware.SessionMiddleware",
    "allauth.account.middleware.AccountMiddleware",  # allauth does not start without it
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

ROOT_URLCONF = "controlplane.urls"
ASGI_APPLICATION = "controlplane.asgi.application"
APPEND_SLASH = False

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "governance.web.pages.show_command",
                "governance.web.pages.show_freeze",
                "governance.web.pages.show_read_only",
            ]
        },
    }
]

# Connections are closed after each use: persistent ones leak under ASGI. The frame path has its own (gateway.records).
DATABASES = {"default": {**read_database(DATABASE_URL or "postgresql:///muster"), "CONN_MAX_AGE": 0}}

AUTH_USER_MODEL = "controlplane.User"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
PASSWORD_HASHERS = [
    "django.contrib.auth.hashers.Argon2PasswordHasher",
    "django.contrib.auth.hashers.PBKDF2PasswordHasher",
]
# Single sign-on. None: only local accounts.
OIDC = check_issuer(
    Issuer(
        url=read_issuer("MUSTER_OIDC_ISSUER"),
        client_id=read_text("MUSTER_OIDC_CLIENT_ID").strip(),
        client_secret=read_text("MUSTER_OIDC_CLIENT_SECRET"),
        name=read_text("MUSTER_OIDC_NAME").strip(),
        scopes=tuple(read_text("MUSTER_OIDC_SCOPES", "openid profile email").replace(",", " ").split()),
        groups_claim=read_text("MUSTER_OIDC_GROUPS_CLAIM", "groups").strip(),
        roles=read_roles("MUSTER_OIDC_ROLES"),
        default_role=read_role("MUSTER_OIDC_DEFAULT_ROLE"),
        allowed_domains=tuple(one.lower().lstrip("@") for one in read_list("MUSTER_OIDC_ALLOWED_DOMAINS")),
    )
)
# Who may still sign in by password or passkey where single sign-on is set up: everybody, or owners alone.
LOCAL_SIGN_IN = read_choice("MUSTER_LOCAL_SIGN_IN", {"all": "", "owners": ""})
SOCIALACCOUNT_STORE_TOKENS = False
ACCOUNT_EMAIL_VERIFICATION = "none"
LOGIN_URL = "signin:login"
LOGIN_REDIRECT_URL = "admin:index"

SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 12 * 3600
# On when a TLS proxy stands in front; plain HTTP on loopback could not keep a session otherwise.
BEHIND_TLS = read_bool("MUSTER_BEHIND_TLS", default=False)
# The proxies that say who their client is. The servers put it into the scope, so nothing behind them reads such a header.
TRUSTED_PROXIES = TrustedProxies(read_networks("MUSTER_TRUSTED_PROXIES"), is_tls=BEHIND_TLS)
# What the servers show when they speak TLS themselves; the key may lie in the certificate's file.
TLS_CERT = read_path("MUSTER_TLS_CERT")
TLS_KEY = read_path("MUSTER_TLS_KEY") or TLS_CERT
IS_HTTPS = BEHIND_TLS or bool(TLS_CERT)
SESSION_COOKIE_SECURE = IS_HTTPS
CSRF_COOKIE_SECURE = IS_HTTPS
LANGUAGE_COOKIE_SECURE = IS_HTTPS
# A browser takes a cookie of this prefix only over TLS and from this very host: no sibling of it can plant one.
SESSION_COOKIE_NAME = "__Host-sessionid" if IS_HTTPS else "sessionid"
CSRF_COOKIE_NAME = "__Host-csrftoken" if IS_HTTPS else "csrftoken"
# It holds for every port of the host: behind a proxy that has 80 and 443, not for a machine whose other servers are plain.
SECURE_HSTS_SECONDS = 31_536_000 if BEHIND_TLS else 0
SILENCED_SYSTEM_CHECKS = [
    "security.W005",  # subdomains of this host may be anybody's
    "security.W008",  # the proxy leads to TLS; health checks on this machine ask without it
    "security.W021",  # browsers' preload lists are for the owner of the whole domain
]
X_FRAME_OPTIONS = "DENY"
SECURE_REFERRER_POLICY = "same-origin"

# Of pages: what the person chose, else the first of these that the browser asks for. Programs are answered in English.
LANGUAGES = [("en", "English"), ("de", "Deutsch")]
LANGUAGE_CODE = "en"
# Of mail and chat messages, which have no browser.
NOTICE_LANGUAGE = read_choice("MUSTER_LANGUAGE", dict(LANGUAGES))
LANGUAGE_COOKIE_HTTPONLY = True
LANGUAGE_COOKIE_SAMESITE = "Lax"
TIME_ZONE = "UTC"
FORMAT_MODULE_PATH = "controlplane.formats"
USE_TZ = True

STATIC_URL = "/static/"
# Served straight from the packages: nothing to collect on a fresh clone. A production image collects into
# MUSTER_STATIC_ROOT and switches the finders off.
STATIC_ROOT = read_text("MUSTER_STATIC_ROOT") or None
WHITENOISE_USE_FINDERS = read_bool("MUSTER_STATIC_FINDERS", default=True)
WHITENOISE_AUTOREFRESH = False

CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "core.hints.HintLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "muster"},
    }
}

# Celery speaks JSON in both directions and carries opaque ids only: rows hold the work, a message is a bell.
CELERY_BROKER_URL = VALKEY.broker_url
# Looked up by whoever sends a task: a gateway then loads Celery, 6 MB, only once it does.
TASK_APP = "controlplane.celery.app"
CELERY_RESULT_BACKEND = None
CELERY_TASK_IGNORE_RESULT = True
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_TIMEZONE = "UTC"
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_TIME_LIMIT = 60
CELERY_WORKER_ETA_TASK_LIMIT = 1000
CELERY_TASK_SOFT_TIME_LIMIT = 45
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# Whoever can write to Valkey could otherwise end a worker by a message to it.
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
CELERY_TASK_DEFAULT_QUEUE = "celery"
CELERY_BROKER_TRANSPORT_OPTIONS = {
    # A message that a worker died with is lost, and its row is due again: nothing of it is kept in Valkey.
    "ack_emulation": False,
    "socket_keepalive": True,
    "health_check_interval": 10,
    # A broker that neither answers nor refuses must not hold whoever rings for longer than this.
    "socket_connect_timeout": 2,
    "socket_timeout": 15,
    **({"master_name": VALKEY.master} if VALKEY.sentinels else {}),
}
CELERY_BEAT_SCHEDULE = {
    "sweep": {"task": "controlplane.tasks.sweep", "schedule": 5.0, "options": {"expires": 10}},
    "tell-failed-reloads": {"task": "nodes.tasks.tell_failed_reloads", "schedule": 30.0, "options": {"expires": 30}},
    "report-unreadable": {"task": "governance.tasks.report_unreadable", "schedule": 60.0, "options": {"expires": 60}},
    "checkpoint-audit": {"task": "governance.tasks.checkpoint_audit", "schedule": 60.0, "options": {"expires": 60}},
    "forget-sign-ins": {"task": "governance.tasks.forget_sign_ins", "schedule": 3600.0, "options": {"expires": 600}},
    "roll-up-history": {"task": "nodes.tasks.roll_up_history", "schedule": 60.0, "options": {"expires": 60}},
    "update-figures": {"task": "gateway.tasks.update_figures", "schedule": 30.0, "options": {"expires": 30}},
    "roll-up-requests": {"task": "gateway.tasks.roll_up_requests", "schedule": 10.0, "options": {"expires": 10}},
    "renew-ticket-key": {"task": "nodes.tasks.renew_ticket_key", "schedule": 3600.0, "options": {"expires": 600}},
    "forget-responses": {
        "task": "gateway.tasks.forget_expired_responses",
        "schedule": 600.0,
        "options": {"expires": 600},
    },
    "send-usage": {"task": "gateway.tasks.send_usage", "schedule": 10.0, "options": {"expires": 10}},
    "tell-budgets": {"task": "gateway.tasks.tell_budgets", "schedule": 60.0, "options": {"expires": 60}},
    "forget-usage": {"task": "gateway.tasks.forget_usage", "schedule": 3600.0, "options": {"expires": 600}},
    "maintain-partitions": {
        "task": "gateway.tasks.maintain_partitions",
        "schedule": 3600.0,
        "options": {"expires": 600},
    },
}

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": ["controlplane.authentication.AdminTokenAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["controlplane.authentication.MayCall"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "controlplane.api_errors.render_exception",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Muster control plane",
    "DESCRIPTION": "Registration and health of GPU nodes, what operators list, and the approval of operations.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SERVE_PUBLIC": True,
    "SERVE_AUTHENTICATION": [],
    "SERVE_PERMISSIONS": [],
    "ENUM_NAME_OVERRIDES": {
        "NodeStatusEnum": [status.value for status in NodeStatus],
        "NodeModeEnum": [mode.value for mode in NodeMode],
        "RequestStateEnum": [state.value for state in RequestState],
        "RequestStatusEnum": [state.value for state in RequestState if state is not RequestState.CANCELLED],
        "RequestOutcomeEnum": [outcome.value for outcome in RequestOutcome],
        "ApprovalStateEnum": [state.value for state in ApprovalState],
        "RunStateEnum": [state.value for state in RunState],
    },
    # The second adds the event stream, which is no view of the REST framework.
    "POSTPROCESSING_HOOKS": ["drf_spectacular.hooks.postprocess_schema_enums", "governance.rest.answers.add_stream"],
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
}

_LOG_FORMAT = read_choice("MUSTER_LOG_FORMAT", dict.fromkeys(LOG_FORMATS, ""))
LOG_FORMAT = choose_format(_LOG_FORMAT, is_terminal=sys.stderr.isatty())
# Whether gateways write a line for each request: on, errors (those that were not served) or off.
ACCESS_LOG = read_choice("MUSTER_ACCESS_LOG", {"on": "", "errors": "", "off": ""})
LOG_LEVEL = read_log_level("MUSTER_LOG_LEVEL")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "line": {
            "()": "wire.logs.make_formatter",
            "said": _LOG_FORMAT,
            "is_terminal": sys.stderr.isatty(),
        },
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    # uvicorn logs the query string of worker sockets, where a legacy worker puts its secret.
    "loggers": {
        "uvicorn.error": {"level": "WARNING"},
        "daphne.http_protocol": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
        # A refused host is one warning of ours (controlplane.api_errors); Django adds an error with a traceback.
        "django.security.DisallowedHost": {"level": "CRITICAL"},
        "celery.app.trace": {"level": "WARNING"},
        # A line for each task that is due every few seconds would bury what a worker has to say.
        "celery.beat": {"level": "WARNING"},
        "celery.worker.strategy": {"level": "WARNING"},
    },
}

# The SDK of traces reads these itself, with all that OpenTelemetry names beside them (``wire.traces``).
TRACES_ENDPOINT = read_text("OTEL_EXPORTER_OTLP_ENDPOINT")
TRACES_SAMPLER = read_text("OTEL_TRACES_SAMPLER", "parentbased_always_on")

_limits = read_limits()
# Whether records and logs keep what an engine said when it failed or refused, without what it repeated of the request.
if not read_bool("MUSTER_KEEP_ENGINE_ERRORS", default=True):
    _limits = replace(_limits, gateway=replace(_limits.gateway, max_engine_error_chars=0))
install(_limits)
SOCIALACCOUNT_REQUESTS_TIMEOUT = _limits.governance.oidc_timeout_s
# What prices and costs are in; a word for people, nothing is converted.
CURRENCY = read_text("MUSTER_CURRENCY", "EUR")
# Shares of tenants while requests wait, such as "research=2.5"; 1 for who is not named.
# Where other gateways reach this one, and the secret they show. Both empty = a single gateway.
GATEWAY_INTERNAL_URL = read_text("MUSTER_INTERNAL_URL")
# What the acknowledgement tells our own nodes to dial as well; empty = only the gateway they found.
GATEWAY_ADVERTISED_URLS = read_list("MUSTER_GATEWAY_URLS")
CLUSTER_SECRET = read_text("MUSTER_CLUSTER_SECRET")
# Where a gateway listens that is given no other address.
GATEWAY_LISTEN = read_address("MUSTER_LISTEN", "127.0.0.1:8080")
# Off: requests without a key are those of the tenant ``keyless``. Where a gateway listens for others, that must be named too.
REQUIRE_API_KEYS = read_bool("MUSTER_REQUIRE_API_KEYS", default=True)
KEYLESS_ADDRESSES = read_list("MUSTER_KEYLESS_ADDRESSES")
PUBLIC_MODEL_LIST = read_bool("MUSTER_PUBLIC_MODEL_LIST", default=True)
# Origins whose pages may call the API from a browser; "*" = all. Empty = none.
CORS_ORIGINS = read_list("MUSTER_CORS_ORIGINS")
METRICS_REQUIRE_TOKEN = read_bool("MUSTER_METRICS_REQUIRE_TOKEN", default=False)
# Whether series name tenants: whoever reads metrics then knows who asks how much.
METRICS_TENANTS = read_bool("MUSTER_METRICS_TENANTS", default=False)
# Folders with a model's tokenizer.json, to count tokens without asking a node. Empty = nodes are asked.
TOKENIZERS_DIR = read_text("MUSTER_TOKENIZERS_DIR")

# Secrets of the operator's own: a node credential, for nodes of that provider, and an admin token.
OWN_WORKER_SECRET = read_secret("MUSTER_WORKER_SECRET")
OWN_ADMIN_TOKEN = read_secret("MUSTER_ADMIN_TOKEN")
OWN_PROVIDER = read_name("MUSTER_PROVIDER", "local")
# Whether a node may show its secret in the URL of its socket, as old workers do.
NODE_ALLOW_QUERY_SECRET = read_bool("MUSTER_ALLOW_QUERY_SECRET", default=True)
# Whether a worker must say which protocol it speaks; old ones do not.
NODE_REJECT_UNVERSIONED = read_bool("MUSTER_REJECT_UNVERSIONED_WORKERS", default=False)
# Keys whose holders may name agents by a JWT: a JWK set, as a file or a URL. Empty = node credentials alone.
AGENT_JWKS = read_text("MUSTER_AGENT_JWKS")
# Nodes that register a URL are called only on these hosts or networks ("private" = every private network); loopback needs the
# second switch.
NODE_DIRECT_HOSTS = read_list("MUSTER_DIRECT_HOSTS")
NODE_DIRECT_ALLOW_LOOPBACK = read_bool("MUSTER_DIRECT_ALLOW_LOOPBACK", default=False)
# What each governed operation does. governance stands below the apps that do it and may not import them.
OPERATIONS = {
    "model-load": "nodes.operations.load.MODEL_LOAD",
    "model-unload": "nodes.operations.load.MODEL_UNLOAD",
    "cache-flush": "nodes.operations.flush.CACHE_FLUSH",
    "settings-reload": "nodes.operations.load.SETTINGS_RELOAD",
    "node-drain": "nodes.operations.hold.NODE_DRAIN",
    "node-evict": "nodes.operations.hold.NODE_EVICT",
    "limit-raise": "gateway.operations.LIMIT_RAISE",
    "admin-token-mint": "governance.operations.kinds.ADMIN_TOKEN_MINT",
    "policy-change": "governance.operations.kinds.POLICY_CHANGE",
    "unfreeze": "governance.operations.kinds.UNFREEZE",
    "break-glass-review": "governance.operations.kinds.BREAK_GLASS_REVIEW",
}
# Who knows which node pinned which approval policy, for the page of the policy. governance knows nothing of nodes.
GOVERNANCE_PINS = "nodes.services.availability.read_policy_pins"
# Who says in words what an alert is, and where it leads; the same.
GOVERNANCE_ALERT_WORDS = "controlplane.problem_words.WORDS"
# Signs audit checkpoints: the 32-byte seed of an Ed25519 key in base64url. Empty = no checkpoints.
GOVERNANCE_LOG_KEY = read_text("MUSTER_LOG_KEY")
GOVERNANCE_LOG_ORIGIN = read_text("MUSTER_LOG_ORIGIN", "muster.local/audit")
# Where people open the control plane: what a passkey is bound to, and where links in notices lead.
PUBLIC_URL = read_text("MUSTER_PUBLIC_URL", "http://localhost:8000")
# Where the playground asks, and what its code names. Scheme, host and port: a browser never chooses the host.
PLAYGROUND_GATEWAY_URL = read_text("MUSTER_PLAYGROUND_GATEWAY_URL", "http://127.0.0.1:8080")
GATEWAY_PUBLIC_URL = read_text("MUSTER_GATEWAY_PUBLIC_URL") or PLAYGROUND_GATEWAY_URL
NOTICE_SENDER = read_text("MUSTER_MAIL_FROM")
# Alerts that are less urgent are not mailed to operators; -1 = none is.
_MAILED = {"impaired": 1, "down": 0, "notice": 2, "none": -1}
ALERT_MAIL_SEVERITY = _MAILED[read_choice("MUSTER_ALERT_MAIL", dict.fromkeys(_MAILED, ""))]
EMAIL_HOST = read_text("MUSTER_MAIL_HOST", "localhost")
EMAIL_PORT = read_int("MUSTER_MAIL_PORT", 25)
EMAIL_HOST_USER = read_text("MUSTER_MAIL_USER")
EMAIL_HOST_PASSWORD = read_text("MUSTER_MAIL_PASSWORD")
EMAIL_USE_TLS = read_bool("MUSTER_MAIL_TLS", default=False)
EMAIL_TIMEOUT = 10
# Who knows which models are allow-listed. The registry stands below the gateway and may not import it.
NODE_MODEL_CHECK = "gateway.services.models.is_model_allowed"
# Who counts live requests of a node, for what approvers read.
NODE_TRAFFIC = "gateway.services.requests.read_traffic_of_node"
# Who knows what a model needs of a GPU.
NODE_MODEL_FIT = "gateway.services.compatibility.explain_misfit"
# Who knows what gateways still run on a draining node.
NODE_DRAIN_FACTS = "gateway.services.requests.read_drain_facts"
NODE_REQUESTS = "gateway.services.node_requests.read_node_requests"

# What templates/admin says of the skin is not said here: colours are in shell.css, the sidebar is controlplane.navigation.
UNFOLD = {
    "SITE_TITLE": "Muster",
    "SITE_HEADER": "Muster",
    "SITE_URL": None,
    "SHOW_HISTORY": False,
    "SHOW_VIEW_ON_SITE": False,
}
raise_errors()
