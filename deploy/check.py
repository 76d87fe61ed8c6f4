"""The chart as Helm lints and renders it, for values of every kind: each object that Kubernetes has by itself is held
to Kubernetes' schema, and values that cannot work are refused with a sentence. And what the compose files name is
there. .ci/deploy runs it where deploy/requirements.txt is installed, of which Helm's own library is a part."""

import shutil
import tempfile
import tomllib
from pathlib import Path

import helm_python as helm
import kubernetes_validate
import yaml

DEPLOY = Path(__file__).parent
CHART = DEPLOY / "helm" / "looplane"
KUBERNETES = "1.37"
# From others; nothing here has their schemas.
CUSTOM = {"ServiceMonitor", "PrometheusRule", "ScaledObject", "InferencePool", "HTTPRoute"}

ALL = {
    "replicas": 2,
    "model": {"path": "/models/m", "name": "m", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "gpus": {"count": 4, "runtimeClassName": "nvidia"},
    "tensorParallel": 2,
    "options": {"max-slots": 64, "prefix-cache": "off"},
    "env": [{"name": "LOOPLANE_LOG", "value": "debug"}],
    "resources": {"requests": {"cpu": "8"}, "limits": {"memory": "64Gi"}},
    "apiKeys": {"secret": "keys"},
    "tls": {"secret": "cert"},
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "rules", "dashboard")},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "autoscaling": {"enabled": True, "by": "keda"},
    "inferencePool": {"enabled": True, "gateway": {"name": "gateway", "namespace": "gateways"}},
    "imagePullSecrets": [{"name": "registry"}],
    "podAnnotations": {"a": "b"},
    "podLabels": {"c": "d"},
    "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "service": {"annotations": {"e": "f"}},
}
WORK = [{}, ALL, {"autoscaling": {"enabled": True, "by": "hpa"}, "replicas": 1}, {"networkPolicy": {"enabled": True}}]
# What it says of values that do not work.
FAIL = [
    ({"drainSeconds": 40}, "terminationGracePeriodSeconds is 90, but must be more than preStopSeconds + 2 x"),
    ({"preStopSeconds": 30}, "must be more than preStopSeconds + 2 x drainSeconds = 90"),
    ({"model": {"path": "/models/m"}}, "model.volume says not where it comes from"),
    ({"gpus": {"count": 4}, "tensorParallel": 8}, "tensorParallel is 8, but there are 4 GPUs"),
    ({"replicas": 9, "autoscaling": {"enabled": True}}, "autoscaling.maxReplicas is 4, fewer than the 9"),
    ({"replica": 2}, "replica"),
    ({"tensorParallel": 3}, "tensorParallel"),
    ({"options": {"port": 80}}, "invalid propertyName 'port'"),
    ({"tls": {"secret": 1}}, "/tls/secret"),
]


def objects(chart: helm.Chart, values: dict) -> list[dict]:
    rendered = chart.render(values, name="here", namespace="there")
    texts = [text for path, text in rendered.items() if path.endswith(".yaml")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found]


def one(found: list[dict], kind: str, name: str = "here-looplane") -> dict:
    [match] = [each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return match


def main() -> None:
    compose()
    with tempfile.TemporaryDirectory() as directory:
        # With files in place of links, of which Helm would tell each time.
        check(Path(shutil.copytree(CHART, Path(directory) / CHART.name)))


def check(path: Path) -> None:
    for values in WORK:
        report = helm.lint(path, values, strict=True)
        # An icon is for catalogues.
        complaints = [each for each in report["messages"] if "icon is recommended" not in each["error"]]
        assert not complaints and not report["errors"], report
    with helm.Chart.load(path) as chart:
        kinds = set()
        for values in WORK:
            for found in objects(chart, values):
                kinds.add(found["kind"])
                if found["kind"] not in CUSTOM:
                    kubernetes_validate.validate(found, KUBERNETES, strict=True)
        missing = CUSTOM - kinds
        assert not missing, missing
        for values, words in FAIL:
            try:
                chart.validate_schema(values)
                chart.render(values)
            except helm.HelmError as error:
                assert words in str(error), (values, error)
            else:
                raise AssertionError(f"not refused: {values}")
        look_at(objects(chart, {}), objects(chart, ALL))
    print(f"helm: {len(WORK)} sets of values lint and render, {len(FAIL)} are refused; {len(kinds)} kinds of objects")
    print(f"not checked against schemas: {', '.join(sorted(CUSTOM))}")


def compose() -> None:
    """Files that are mounted or built from exist, and images of others have a version."""
    folder = DEPLOY / "compose"
    services = {}
    for path in (folder / "compose.yaml", folder / "gpus.yaml"):
        for name, service in yaml.safe_load(path.read_text())["services"].items():
            services.setdefault(name, []).append(service)
    for service in (each for parts in services.values() for each in parts):
        hosts = [volume.split(":")[0] for volume in service.get("volumes", [])]
        for host in [host for host in hosts if host.startswith(".")]:
            assert (folder / host).is_file(), host
        if build := service.get("build"):
            assert (folder / build["context"] / build["dockerfile"]).is_file(), build
        elif image := service.get("image"):
            assert image.rpartition(":")[2][:1].isdigit() or image.rpartition(":")[2].startswith("v"), image
    for path in ("prometheus.yaml", "grafana.yaml", "dashboards.yaml"):
        assert yaml.safe_load((folder / path).read_text()), path
    print(f"compose: {', '.join(services)}")


def look_at(plain: list[dict], full: list[dict]) -> None:
    """That values come to where they belong."""
    assert sorted(each["kind"] for each in plain) == ["Deployment", "PodDisruptionBudget", "Service"]
    version = tomllib.loads((DEPLOY.parent / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    for found, scheme, image in [(plain, "HTTP", version), (full, "HTTPS", f"{version}-cuda")]:
        pod = one(found, "Deployment")["spec"]["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == f"looplane:{image}", container["image"]
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
        assert {get["scheme"] for get in probes.values()} == {scheme}
        assert [probes[name]["path"] for name in ("startup", "liveness", "readiness")] == [
            "/health/live",
            "/health/live",
            "/health/ready",
        ]
    pod = one(full, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    wanted = {"--tp=2", "--replicas=2", "--device=cuda", "--model=/models/m", "--max-slots=64", "--metrics-without-key"}
    assert wanted < set(container["args"]), container["args"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]} == {"sockets", "kernels", "models", "keys", "tls"}
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules.yaml").read_text())
    assert one(full, "PrometheusRule")["spec"] == rules
    dashboard = one(full, "ConfigMap", "here-looplane-dashboard")["data"]["looplane.json"]
    assert yaml.safe_load(dashboard)["title"] == "Looplane"


if __name__ == "__main__":
    main()
