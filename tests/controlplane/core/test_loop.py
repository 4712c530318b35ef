from tests.controlplane.core.scripted import Fleet


def test_a_deployment_becomes_ready(fleet: Fleet) -> None:
    fleet.join("a")
    fleet.deploy_ready()
    assert fleet.serving() == ["decode-0", "prefill-0"]
