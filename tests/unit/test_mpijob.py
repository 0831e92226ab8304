"""The MPIJob for Kubernetes: rights of its pods, and access to them."""

from pathlib import Path

import pytest
import yaml

from hvd_train import __version__

MPIJOB = Path(__file__).parents[2] / "horovodrun_scripts/mpijob.yaml"
DOCUMENTS = {document["kind"]: document for document in yaml.safe_load_all(MPIJOB.read_text())}
LABEL = "training.kubeflow.org/job-name"


def test_only_the_pods_of_the_job_reach_its_ports() -> None:
    """The operator labels the pods of a job with its name."""
    job, policy = DOCUMENTS["MPIJob"], DOCUMENTS["NetworkPolicy"]["spec"]
    own = {"matchLabels": {LABEL: job["metadata"]["name"]}}
    assert policy == {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_a_pod_has_minimal_rights(role: str) -> None:
    pod = DOCUMENTS["MPIJob"]["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == f"hvd_train:{__version__}"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
