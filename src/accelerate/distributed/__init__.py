"""The processes of a run: identity, rendezvous, coordination, mesh, collectives, hang watch, failures. Internal."""
