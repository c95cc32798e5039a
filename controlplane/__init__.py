"""The Django project: settings, servers, admin site, launcher. The only place that knows every app."""
