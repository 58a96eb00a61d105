"""The operations screens, of a Django project (`path("ops/", include("tasuki.django.ops.urls"))`) and of a tasuki server.

A request goes from `urls` to one function of `views`, wrapped by `screens.screen`: it asks for a login and a permission, calls
the function, renders its template, or its rows as CSV or JSON, and sets the headers. Functions ask the backend of the request:
in a project its database, by `tasuki.django.operations`, as the management commands do; at a server the server itself, by a
client. Screens bring their own template engine and files. Reading works without JavaScript. May import everything but
`tasuki.cli` and `tasuki.testing`; imported by the URLs of a project, and by `cli` for a server.

    urls            addresses; server_urls: those of a server's own Django application
    screens         login, permissions, language, rendering, exports, files
    views           the screens and their actions; project_views, server_views: those of a project or a server alone
    reasons         why a job is in its state, in the viewer's language
    charts          lines over time, drawn from the rollups of the servers
    backend         what the screens ask, and the answers of a project
    server_backend  the screens of a server: sessions, the door's part, the answers of the server
    cells           template tags: cells of tables, links
    templates/      HTML
    ../locale/      Japanese; after a change: msgfmt --check -o django.mo django.po
    assets/         the style sheet and the script: live parts, local times, confirmations
"""
