"""The operations screens of a Django project: `path("ops/", include("tasuki.django.ops.urls"))`.

A request goes from `urls` to one function of `views`, wrapped by `screens.screen`: it asks for a login and a permission, calls
the function, renders its template, or its rows as CSV or JSON, and sets the headers. Jobs are changed by
`tasuki.django.operations`, as by the management commands. Screens bring their own template engine and files: besides Django's
auth and sessions they need nothing of the project. Reading works without JavaScript.

    urls        addresses
    screens     login, permissions, rendering, exports, files
    views       the screens and their actions
    cells       template tags: cells of tables, links
    templates/  HTML
    assets/     the style sheet and the script: live parts, local times, confirmations
"""
