"""`manage.py tasuki_*`: thin around the modules of the app."""
