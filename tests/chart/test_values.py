"""What each value does, one test a value, in helm-unittest's way: set it, render, look at the document."""

from __future__ import annotations

import base64
import json
import shlex

import pytest
import typer
import yaml
from google.protobuf import json_format

from cluster.cli import deploy  # noqa: F401 - registers the commands that pods run
from cluster.cli.app import app
from cluster.group import LAST_WORDS_S
from common.proto import router_pb2
from tests.support.chart import CHART, RELEASE, helm, render

TP4 = {"name": "decode-tp4", "role": "decode", "layout": {"tp": 4, "ep": 4}, "replicas": {"min": 0, "max": 3}}
PREFILL = {"name": "prefill", "role": "prefill"}


@pytest.fixture(scope="module")
def default():
    return render()


def worker_of(rendered, pool="decode-tp1"):
    return rendered.group(pool)["template"]["spec"]


# -- head --------------------------------------------------------------------------------------------------------------------------


def test_the_head_runs_no_rank_and_shows_its_dashboard_to_itself_alone(default):
    params = default.ray["headGroupSpec"]["rayStartParams"]
    assert (params["num-cpus"], params["num-gpus"], params["dashboard-host"]) == ("0", "0", "127.0.0.1")


def test_autoscaler_v2_watches_with_rights_on_its_own_cluster_alone(default):
    assert default.ray["enableInTreeAutoscaling"] is True
    assert default.ray["autoscalerOptions"]["version"] == "v2"
    rules = default.one("Role", "-autoscaler")["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch", "patch"}
    assert next(rule for rule in rules if "rayclusters" in rule["resources"])["resourceNames"] == [default.fullname]
    assert default.ray["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] is True


def test_without_autoscaling_no_pod_holds_a_token_of_the_cluster():
    rendered = render({"head": {"enableInTreeAutoscaling": False}})
    assert "autoscalerOptions" not in rendered.ray
    assert not rendered.has("Role")
    assert {pod["automountServiceAccountToken"] for _, pod in rendered.pods()} == {False}


def test_the_controller_is_kept_beside_the_head_before_ray_starts(default):
    head = default.ray["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert len(head["command"]) == 1
    assert head["command"][0].startswith("(while true; do tandem controller --config /etc/tandem/config/config.yaml;")
    assert head["command"][0].endswith("&)"), "KubeRay appends `&& ray start`"
    assert {port["name"]: port["containerPort"] for port in head["ports"]}["directory"] == 50050


def test_ray_start_params_are_passed_on():
    values = {"head": {"rayStartParams": {"object-store-memory": "1"}}, "worker": {"rayStartParams": {"log-color": "false"}}}
    rendered = render(values)
    assert rendered.ray["headGroupSpec"]["rayStartParams"]["object-store-memory"] == "1"
    assert rendered.group("decode-tp1")["rayStartParams"]["log-color"] == "false"


def test_gcs_fault_tolerance_takes_an_external_redis():
    redis = {"enabled": True, "redisAddress": "redis://r:6379", "redisPassword": {"existingSecret": "pw", "key": "k"}}
    assert render({"gcsFaultTolerance": redis}).ray["gcsFaultToleranceOptions"] == {
        "backend": "redis",
        "redisAddress": "redis://r:6379",
        "externalStorageNamespace": "demo-tandem",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "pw", "key": "k"}}},
    }


def test_workers_outlive_a_head_that_is_replaced(default):
    """A raylet gives its head ten minutes to come back; Ray's own minute would restart every pool."""
    for container in (default.ray["headGroupSpec"]["template"]["spec"]["containers"][0], worker_of(default)["containers"][0]):
        assert {"name": "RAY_gcs_rpc_server_reconnect_timeout_s", "value": "600"} in container["env"]


# -- pools -------------------------------------------------------------------------------------------------------------------------


def test_a_pool_is_a_worker_group_whose_pods_hold_one_group_each():
    rendered = render({"pools": [PREFILL, TP4]})
    group = rendered.group("decode-tp4")
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (0, 0, 3)
    assert (group["rayStartParams"]["num-gpus"], group["rayStartParams"]["num-cpus"]) == ("4", "4")
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "4", "a bundle of the group always fits into one pod"
    assert group["labels"] == {"tandem.dev/pool": "decode-tp4"}


def test_additional_worker_groups_change_one_pool():
    changed = {"nodeSelector": {"disk": "nvme"}, "minReplicas": 0, "maxReplicas": 7, "replicas": 2, "priorityClassName": "high"}
    rendered = render({"additionalWorkerGroups": {"decode-tp1": changed}})
    group, other = rendered.group("decode-tp1"), rendered.group("prefill-tp1")
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (0, 2, 7)
    assert worker_of(rendered)["nodeSelector"] == {"disk": "nvme"}
    assert worker_of(rendered)["priorityClassName"] == "high"
    assert (other["minReplicas"], other["maxReplicas"]) == (1, 1)
    assert "nodeSelector" not in worker_of(rendered, "prefill-tp1")


def test_gpu_resource_may_be_a_mig_instance_and_is_absent_on_cpus():
    mig = worker_of(render({"worker": {"gpuResource": "nvidia.com/mig-3g.71gb"}}))["containers"][0]["resources"]["limits"]
    assert mig["nvidia.com/mig-3g.71gb"] == "1"
    cpu = render({"cluster": {"device": "cpu"}})
    assert worker_of(cpu)["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory"}
    assert cpu.group("decode-tp1")["rayStartParams"]["num-gpus"] == "0"


def test_shared_memory_is_a_volume_of_its_size():
    spec = worker_of(render({"worker": {"shmSize": "3Gi"}}))
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}} in spec["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]


def test_groups_of_a_pool_are_spread_over_nodes_unless_told_otherwise(default):
    (spread,) = worker_of(default)["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"]["tandem.dev/component"] == "pool-decode-tp1"
    zone = {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"a": "b"}}}
    assert worker_of(render({"worker": {"topologySpreadConstraints": [zone]}}))["topologySpreadConstraints"][0]["topologyKey"] == "zone"


def test_placement_of_workers_is_passed_on():
    placed = {"tolerations": [{"key": "k", "operator": "Exists"}], "nodeSelector": {"a": "b"}, "runtimeClassName": "nvidia"}
    spec = worker_of(render({"worker": placed, "imagePullSecrets": [{"name": "pull"}]}))
    assert {key: spec[key] for key in placed} == placed
    assert spec["imagePullSecrets"] == [{"name": "pull"}]


def test_a_pool_loses_one_pod_at_a_time_to_disruptions(default):
    assert default.one("PodDisruptionBudget", "-pool-decode-tp1")["spec"]["maxUnavailable"] == 1
    own = {"decode-tp1": {"podDisruptionBudget": {"enabled": False, "maxUnavailable": 1}}}
    assert len([d for d in render({"additionalWorkerGroups": own}) if d["metadata"]["name"].endswith("decode-tp1")]) == 0


def test_idle_pods_go_after_their_time(default):
    assert default.group("decode-tp1")["idleTimeoutSeconds"] == 120
    assert default.ray["autoscalerOptions"]["idleTimeoutSeconds"] == 60


def test_a_worker_pod_says_what_it_waits_for_before_ray_starts(default):
    (prepare,) = worker_of(default, "prefill-tp1")["initContainers"]
    assert prepare["command"][:2] == ["tandem", "prepare"]
    assert prepare["command"][-1] == "prefill-tp1"
    assert prepare["args"][-2:] == ["--report", "/dev/termination-log"]


def test_compiled_kernels_may_stay_on_the_node():
    """In a folder that is there: one that kubelet made would be root's, and no rank could write to it."""
    spec = worker_of(render({"kernelCache": {"hostPath": "/var/cache/t"}}))
    assert {"name": "kernel-cache", "hostPath": {"path": "/var/cache/t", "type": "Directory"}} in spec["volumes"]
    for container in (*spec["initContainers"], spec["containers"][0]):
        assert {"name": "TRITON_CACHE_DIR", "value": "/var/cache/tandem/triton"} in container["env"]


# -- weights -----------------------------------------------------------------------------------------------------------------------


def volume_of(spec):
    return next(volume for volume in spec["volumes"] if volume["name"] == "models")


def test_weights_come_from_a_claim_that_is_there_or_made_and_kept():
    assert volume_of(worker_of(render({"weights": {"pvc": {"claimName": "mine"}}})))["persistentVolumeClaim"] == {"claimName": "mine"}
    made = render({"weights": {"pvc": {"create": {"enabled": True, "size": "7Gi"}}}})
    claim = made.one("PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == "7Gi"
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert volume_of(worker_of(made))["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_weights_come_from_a_folder_of_the_node():
    rendered = render({"weights": {"source": "hostPath", "hostPath": {"path": "/data/models"}}})
    for where, pod in rendered.pods():
        if "frontend" not in where:
            assert volume_of(pod)["hostPath"] == {"path": "/data/models", "type": "Directory"}, where


def test_weights_are_downloaded_whole_by_workers_and_the_small_files_by_others():
    download = {"repository": "openai/gpt-oss-120b", "revision": "abc", "tokenSecret": "hf"}
    rendered = render({"weights": {"source": "download", "download": download}})
    fetch = worker_of(rendered)["initContainers"][0]
    assert fetch["command"] == ["hf", "download", "openai/gpt-oss-120b", "--local-dir", "/models/gpt-oss-20b"]
    assert "--revision=abc" in fetch["args"]
    assert not any("--include" in arg for arg in fetch["args"])
    assert fetch["env"][-1]["valueFrom"]["secretKeyRef"] == {"name": "hf", "key": "HF_TOKEN"}
    for where, pod in rendered.pods():
        if where in ("head", rendered.fullname + "-router"):
            assert "--include=*.json" in pod["initContainers"][0]["args"]


def test_only_the_preparation_may_write_weights_and_nobody_where_they_are_read_only(default):
    def may_write(rendered):
        mounts = [(where, mount) for where, container in rendered.containers() for mount in container["volumeMounts"]]
        return {where for where, mount in mounts if mount["name"] == "models" and not mount.get("readOnly")}

    assert may_write(default) == {"prefill-tp1/prepare", "decode-tp1/prepare"}
    assert may_write(render({"weights": {"readOnly": True}})) == set()


# -- router and frontend -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["router", "frontend"])
def test_deployments_have_two_replicas_a_budget_and_an_autoscaler_on_running_streams(default, name):
    assert default.one("Deployment", f"-{name}")["spec"]["replicas"] == 2
    assert default.one("PodDisruptionBudget", f"-{name}")["spec"]["maxUnavailable"] == 1
    scaler = default.one("HorizontalPodAutoscaler", f"-{name}")["spec"]
    assert (scaler["minReplicas"], scaler["scaleTargetRef"]["name"]) == (2, f"demo-tandem-{name}")
    assert scaler["metrics"][0]["pods"]["metric"]["name"] in exported_metrics()
    assert default.one("Deployment", f"-{name}")["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def exported_metrics():
    from common import metric_catalog

    return {d.name for d in (*metric_catalog.ROUTER, *metric_catalog.FRONTEND)}


def test_router_probes_ask_grpc_health_for_the_process_and_for_the_service(default):
    container = default.one("Deployment", "-router")["spec"]["template"]["spec"]["containers"][0]
    assert container["livenessProbe"]["grpc"] == {"port": 50051}
    assert container["readinessProbe"]["grpc"] == {"port": 50051, "service": "tandem.router.v1.Router"}
    assert container["args"] == ["--controller", "demo-tandem-head-svc:50050"]


def test_frontend_is_ready_while_its_router_serves(default):
    container = default.one("Deployment", "-frontend")["spec"]["template"]["spec"]["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health"
    assert container["args"] == ["--router", "demo-tandem-router:50051"]


@pytest.mark.parametrize("drain_s", [0, 30, 120.5, 600])
def test_a_pod_lives_longer_than_its_drain(drain_s):
    """A kubelet that kills earlier would cut streams instead of ending them with an error."""
    values = {"router": {"drain_s": drain_s}, "frontend": {"drain_s": drain_s}}
    rendered = render(values)
    for name in ("-router", "-frontend"):
        pod = rendered.one("Deployment", name)["spec"]["template"]["spec"]
        sleep_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= sleep_s + drain_s + 10
    assert yaml.safe_load(rendered.config)["router"]["drain_s"] == drain_s


@pytest.mark.parametrize("grace_s", [0, 30, 120.5])
def test_a_worker_pod_drains_its_groups_before_it_goes_and_lives_longer_than_that(grace_s):
    rendered = render({"cluster": {"drain_grace_s": grace_s, "controller_listen": "0.0.0.0:50055"}})
    for pool in ("prefill-tp1", "decode-tp1"):
        pod = worker_of(rendered, pool)
        container = pod["containers"][0]
        shell, flag, line = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        arguments = shlex.split(line.removeprefix("exec tandem "))
        command = typer.main.get_command(app).commands[arguments[0]]
        with command.make_context("leave", arguments[1:]) as context:
            given = context.params
        assert (given["node"], given["controller"]) == ("$TANDEM_NODE_ADDRESS", "$FQ_RAY_IP:50055")
        assert {"name": "TANDEM_NODE_ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
        assert str(given["config"]) == "/etc/tandem/config/config.yaml"
        assert any(mount["mountPath"] == str(given["config"].parent) for mount in container["volumeMounts"])
        assert grace_s + LAST_WORDS_S < given["timeout_s"] < pod["terminationGracePeriodSeconds"] - 20
    assert yaml.safe_load(rendered.config)["cluster"]["drain_grace_s"] == grace_s


def test_a_worker_pod_that_leaves_needs_no_right_in_kubernetes_and_no_door_of_its_own(default):
    """It asks the directory, which pods of the release reach, with the cluster's key, which it has anyway."""
    assert worker_of(default)["automountServiceAccountToken"] is False
    key = yaml.safe_load(default.config)["cluster"]["key_file"]
    assert any(key.startswith(mount["mountPath"]) for mount in worker_of(default)["containers"][0]["volumeMounts"])
    assert all(policy["spec"]["policyTypes"] == ["Ingress"] for policy in default if policy["kind"] == "NetworkPolicy")


def test_replicas_without_an_autoscaler_are_those_given():
    rendered = render({"deployments": {"router": {"replicas": 5, "autoscaling": {"enabled": False}}}})
    assert rendered.one("Deployment", "-router")["spec"]["replicas"] == 5
    assert [d["metadata"]["name"] for d in rendered if d["kind"] == "HorizontalPodAutoscaler"] == ["demo-tandem-frontend"]


def test_services_take_type_port_and_annotations():
    service = {"type": "LoadBalancer", "port": 443, "annotations": {"lb": "internal"}}
    router = render({"deployments": {"router": {"service": service}}}).one("Service", "-router")
    assert router["spec"]["type"] == "LoadBalancer"
    assert router["metadata"]["annotations"] == {"lb": "internal"}
    assert {port["name"]: port["port"] for port in router["spec"]["ports"]}["grpc"] == 443


def test_chat_over_grpc_has_a_port_where_it_is_configured(default):
    rendered = render({"frontend": {"grpc_listen": "0.0.0.0:8001"}})
    assert "chat" in {port["name"] for port in rendered.one("Service", "-frontend")["spec"]["ports"]}
    assert "chat" not in {port["name"] for port in default.one("Service", "-frontend")["spec"]["ports"]}


def test_no_frontend_where_none_is_wanted():
    assert [d["metadata"]["name"] for d in render({"deployments": {"frontend": {"enabled": False}}}) if d["kind"] == "Deployment"] == [
        "demo-tandem-router"
    ]


def test_pods_start_anew_when_the_configuration_changes(default):
    def annotation(rendered):
        return rendered.one("Deployment", "-router")["spec"]["template"]["metadata"]["annotations"]["checksum/config"]

    assert annotation(default) == annotation(render())
    assert annotation(default) != annotation(render({"prices": {"usd_per_gpu_hour": 2.0}}))


# -- security ----------------------------------------------------------------------------------------------------------------------


def test_only_pods_of_the_release_reach_each_other(default):
    members = default.one("NetworkPolicy", "-members")["spec"]
    labels = {"app.kubernetes.io/instance": "demo", "app.kubernetes.io/part-of": "tandem"}
    assert members["podSelector"]["matchLabels"] == labels
    assert members["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    groups = [default.ray["headGroupSpec"], *default.ray["workerGroupSpecs"]]
    deployments = [d["spec"] for d in default if d["kind"] == "Deployment"]
    for template_ in (spec["template"] for spec in [*groups, *deployments]):
        assert labels.items() <= template_["metadata"]["labels"].items()


def test_others_reach_the_ports_for_clients_and_scrapers_alone(default):
    clients = default.one("NetworkPolicy", "-clients")["spec"]["ingress"]
    assert [port["port"] for port in clients[0]["ports"]] == ["grpc", "http"]
    scrapers = default.one("NetworkPolicy", "-metrics")["spec"]["ingress"]
    assert [port["port"] for port in scrapers[0]["ports"]] == ["metrics", "controller", "group"]
    assert "from" in scrapers[0]
    assert sum(d["kind"] == "NetworkPolicy" for d in default) == 3, "the operator needs no door with a RayCluster"
    named = {port["name"] for _, container in default.containers() for port in container.get("ports", [])}
    assert {"grpc", "http", "metrics", "controller", "group"} <= named


def test_clients_may_be_named():
    who = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    assert render({"networkPolicy": {"clientFrom": who}}).one("NetworkPolicy", "-clients")["spec"]["ingress"][0]["from"] == who
    assert not render({"networkPolicy": {"enabled": False}}).has("NetworkPolicy")


def test_secrets_are_made_where_none_is_named(default):
    transfer = default.one("Secret", "-transfer")["data"]["key"]
    assert len(base64.b64decode(transfer)) >= 32
    assert len(base64.b64decode(default.one("Secret", "-ray")["data"]["auth_token"])) == 64
    assert default.ray["authOptions"] == {"mode": "token", "secretName": "demo-tandem-ray"}
    named = render({"secrets": {"transferKey": {"existingSecret": "a"}, "rayAuth": {"existingSecret": "b"}}})
    assert not named.has("Secret")
    assert named.ray["authOptions"]["secretName"] == "b"
    assert any(v.get("secret", {}).get("secretName") == "a" for v in worker_of(named)["volumes"])


def test_secrets_of_two_installations_differ(default):
    assert default.one("Secret", "-transfer")["data"] != render().one("Secret", "-transfer")["data"]


def test_no_made_secret_would_change_in_an_upgrade():
    """helm has no cluster to look into here; so the templates themselves must ask for the Secret that is there before they make one."""
    for path in (CHART / "templates").glob("*.yaml"):
        text = path.read_text()
        for maker in ("randBytes", "randAlphaNum", "genCA", "genSignedCert"):
            if maker in text:
                assert text.count('lookup "v1" "Secret"') >= 1, path.name
                assert text.index('lookup "v1" "Secret"') < text.index(maker), path.name


def test_tls_is_made_by_the_chart_with_every_name_that_is_called():
    from cryptography import x509

    rendered = render({"secrets": {"tls": {"enabled": True, "dnsNames": ["llm.example"]}}})
    data = rendered.one("Secret", "-tls")["data"]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(data["tls.crt"]))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
    assert {"demo-tandem-router", "demo-tandem-router.default.svc", "demo-tandem-frontend", "demo-tandem-head-svc", "llm.example"} <= set(
        names
    )
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(base64.b64decode(data["ca.crt"])))


def test_tls_may_come_from_cert_manager_or_a_secret():
    issuer = {"name": "ca", "kind": "Issuer"}
    rendered = render({"secrets": {"tls": {"enabled": True, "certManager": {"enabled": True, "issuerRef": issuer}}}})
    certificate = rendered.one("Certificate")["spec"]
    assert certificate["secretName"] == "demo-tandem-tls"
    assert certificate["issuerRef"] == issuer | {"group": "cert-manager.io"}
    assert not any(d["metadata"]["name"].endswith("-tls") for d in rendered if d["kind"] == "Secret")
    mine = render({"secrets": {"tls": {"enabled": True, "existingSecret": "mine"}}})
    assert any(v.get("secret", {}).get("secretName") == "mine" for v in worker_of(mine)["volumes"])


def test_tls_and_tokens_stand_in_the_configuration_that_every_process_reads():
    config = yaml.safe_load(render({"secrets": {"tls": {"enabled": True, "mutual": "all"}, "tokens": {"enabled": True}}}).config)
    folder = "/etc/tandem/tls"
    assert config["security"]["tls"] == {
        "ca_file": f"{folder}/ca.crt", "cert_file": f"{folder}/tls.crt", "key_file": f"{folder}/tls.key",
        "mutual": "all", "peer_name": "demo-tandem",
    }  # fmt: skip
    assert config["security"]["tokens_file"] == "/etc/tandem/tokens/tokens.yaml"
    assert (config["frontend"]["https"], config["frontend"]["token_file"]) == (True, "/etc/tandem/tokens/client")
    own = {"security": {"tls": {"ca_file": "/a", "cert_file": "/b", "key_file": "/c"}}}
    assert yaml.safe_load(render(own).config)["security"] == own["security"]


def test_made_tokens_are_what_the_loader_of_tokens_reads(tmp_path):
    from common.access import Role, Tokens
    from common.keyring import Keyring

    data = render({"secrets": {"tokens": {"enabled": True}}}).one("Secret", "-tokens")["data"]
    (tmp_path / "tokens.yaml").write_bytes(base64.b64decode(data["tokens.yaml"]))
    tokens = Tokens(tmp_path / "tokens.yaml", Keyring([b"k" * 32]))
    for name, role in (("client", Role.CLIENT), ("operator", Role.OPERATOR)):
        assert tokens.role_of(f"Bearer {base64.b64decode(data[name]).decode()}") == role


def test_a_made_transfer_key_is_what_the_loader_of_keys_reads(default, tmp_path):
    from common.keyring import Keyring

    (tmp_path / "key").write_bytes(base64.b64decode(default.one("Secret", "-transfer")["data"]["key"]))
    assert len(Keyring.of_file(tmp_path / "key").current()) == 64


def test_with_tls_the_routers_own_command_asks_for_its_health():
    pod = render({"secrets": {"tls": {"enabled": True}}}).one("Deployment", "-router")["spec"]["template"]["spec"]
    ask = ["tandem", "probe", "--config", "/etc/tandem/config/config.yaml"]
    assert pod["containers"][0]["livenessProbe"]["exec"]["command"] == ask
    assert pod["containers"][0]["readinessProbe"]["exec"]["command"] == [*ask, "--ready"]


# -- RayService, monitoring, notes ----------------------------------------------------------------------------------------------------


def test_a_ray_service_deploys_the_same_cluster_behind_one_application(default):
    service = render({"kind": "RayService"})
    spec = service.one("RayService")["spec"]
    applications = yaml.safe_load(spec["serveConfigV2"])["applications"]
    assert [app["import_path"] for app in applications] == ["cluster.serve_app:build"]
    assert spec["upgradeStrategy"] == {"type": "NewCluster"}
    assert service.ray["workerGroupSpecs"] == default.ray["workerGroupSpecs"]
    assert service.has("NetworkPolicy")
    operator = service.one("NetworkPolicy", "-operator")["spec"]
    assert operator["podSelector"]["matchLabels"]["tandem.dev/component"] == "head"


def test_monitoring_is_off_until_asked_for(default):
    assert not any(default.has(kind) for kind in ("ServiceMonitor", "PodMonitor", "PrometheusRule"))
    on = {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "dashboards", "prometheusRule")}
    rendered = render({"monitoring": on | {"podMonitor": {"enabled": True, "interval": "7s", "labels": {"release": "prom"}}}})
    monitor = rendered.one("PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"
    assert {(e["port"], e["interval"]) for e in monitor["spec"]["podMetricsEndpoints"]} == {
        ("controller", "7s"), ("group", "7s"), ("metrics", "7s")
    }  # fmt: skip
    endpoint = rendered.one("ServiceMonitor")["spec"]["endpoints"][0]["port"]
    assert all(endpoint in {p["name"] for p in rendered.one("Service", name)["spec"]["ports"]} for name in ("-router", "-frontend"))


def test_dashboard_and_rules_are_the_files_of_the_chart():
    rendered = render({"monitoring": {"dashboards": {"enabled": True}, "prometheusRule": {"enabled": True}}})
    dashboards = {path.name: path.read_text() for path in (CHART / "dashboards").glob("*.json")}
    assert rendered.one("ConfigMap", "-dashboards")["data"] == dashboards
    groups = [group for path in sorted((CHART / "rules").glob("*.yaml")) for group in yaml.safe_load(path.read_text())["groups"]]
    assert rendered.one("PrometheusRule")["spec"]["groups"] == groups


def test_names_may_be_overridden_and_stay_short():
    assert render({"nameOverride": "oss"}).fullname == f"{RELEASE}-oss"
    assert render({"fullnameOverride": "chat"}).fullname == "chat"
    assert len(render({"fullnameOverride": "x" * 63}).fullname) == 40


def test_the_image_is_the_charts_own_version_unless_named(default):
    assert {container["image"] for _, container in default.containers()} == {"tandem:0.1.0"}
    other = render({"image": {"repository": "r/t", "tag": "1.2", "pullPolicy": "Always"}})
    assert {(c["image"], c["imagePullPolicy"]) for _, c in other.containers()} == {("r/t:1.2", "Always")}


@pytest.mark.parametrize(("values", "says"), [({}, "-plaintext"), ({"secrets": {"tls": {"enabled": True}}}, "-cacert ca.crt")])
def test_notes_give_the_first_request(values, says, tmp_path):
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    shown = helm("install", RELEASE, str(CHART), "--dry-run=client", "-f", str(tmp_path / "values.yaml")).stdout.partition("NOTES:")[2]
    assert "localhost:50051 tandem.router.v1.Router/Generate" in shown
    assert f"grpcurl {says}" in shown
    request = json.loads(shown.partition("-d '")[2].partition("'")[0])
    json_format.ParseDict(request, router_pb2.GenerateRequest())
