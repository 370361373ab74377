"""The front process: from a child's spec to the HTTP server and the conductor. No torch."""

from __future__ import annotations

import socket

from mstar.api_server.server import run_front
from mstar.conductor.front_spec import FrontSpec
from mstar.launch.children import ChildSpec
from mstar.launch.deployment import open_deployment


def run_front_process(spec: ChildSpec) -> None:
    """Until the supervisor asks for the end and running requests have finished."""
    assert spec.listen_fd is not None, "the supervisor hands the bound socket to the front"
    deployment = open_deployment(spec.facts)
    compiled = deployment.compile(deployment.model())
    front = FrontSpec(
        address=spec.address,
        supervisor_address=spec.supervisor_address,
        card=deployment.card,
        setup=deployment.setup,
        served_names=deployment.facts.served_names,
        placement=compiled.placement,
        server=deployment.config.server,
        max_rows=deployment.config.scheduler.max_rows,
        max_queue=deployment.config.scheduler.max_queue,
        incarnation=spec.incarnation,
    )
    run_front(front, socket.socket(fileno=spec.listen_fd))
