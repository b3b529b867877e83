"""Descriptions of events in a few words."""

from __future__ import annotations

from .document import Event


def describe(event: Event) -> str:
    """Describe an event in a few words."""
    kind = event.get("event")
    folder = str(event.get("folder") or "").rpartition("/")[2]
    texts = {
        "start": "started",
        "restart": f"restarted (attempt {event.get('attempt')})",
        "save": f"saved {folder}",
        "load": f"resumed from {folder or 'a checkpoint'}",
        "epoch": f"epoch {event.get('epoch')} done",
        "end": "finished",
        "stop": f"stopped: {event.get('text')}",
        "error": f"failed: {event.get('text')}",
        "killed": f"ended: {event.get('text')}",
        "preempted": f"preempted by {event.get('text')}, after {folder} was saved",
    }
    return texts.get(str(kind)) or str(event.get("text") or kind)
