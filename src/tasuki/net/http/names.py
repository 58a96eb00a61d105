"""What both ends of the protocol over HTTP must call by the same name. Nothing else."""

from __future__ import annotations

FRAMES_PATH = "/v1/frames"
FRAMES_TYPE = "application/vnd.tasuki.frames"
FRAMES_MAX = 64  # of one request
WORKER_PATH = "/v1/worker"
SESSION_HEADER = "Tasuki-Session"
BLOBS_PATH = "/v1/blobs"
