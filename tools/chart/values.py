"""What `helm/tandem/values.yaml` may hold: the config tree at the top, and beside it what only Kubernetes needs.

The nodes below carry no defaults of their own: `values.yaml` shows them all. Names are those of KubeRay's ray-cluster chart where the
thing is the same. `tools/chart/schema.py` makes `values.schema.json` of this.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.alias_generators import to_camel

from common.config import Config

Kubernetes = dict[str, Any]  # checked by the API server, passed on as it is
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9.]+(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
Text = Annotated[str, StringConstraints(min_length=1)]
Seconds = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class Node(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)


class Amounts(Node):
    """Of one container. `nvidia.com/gpu` is set by the chart from the pool's layout."""

    cpu: Quantity | int | float
    memory: Quantity


class Resources(Node):
    requests: Amounts
    limits: Amounts


class Image(Node):
    repository: Text
    tag: str = Field(description="empty = the chart's appVersion; latest is refused")
    pull_policy: Literal["Always", "IfNotPresent", "Never"]


class Pod(Node):
    """What pods of every kind have in common."""

    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    container_env: list[Kubernetes] | None = None
    env_from: list[Kubernetes] | None = None
    resources: Resources | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[Kubernetes] | None = None
    affinity: Kubernetes | None = None
    topology_spread_constraints: list[Kubernetes] | None = None
    priority_class_name: str | None = None
    pod_security_context: Kubernetes | None = None
    security_context: Kubernetes | None = None
    volumes: list[Kubernetes] | None = None
    volume_mounts: list[Kubernetes] | None = None


class RayPod(Pod):
    ray_start_params: dict[str, str] | None = None
    init_containers: list[Kubernetes] | None = None
    sidecar_containers: list[Kubernetes] | None = None
    runtime_class_name: str | None = None
    shm_size: Quantity | None = Field(default=None, description="of /dev/shm; counts against the memory limit")


class AutoscalerOptions(Node):
    """KubeRay's `autoscalerOptions`; version v2 because v1 ignores node labels."""

    version: Literal["v2"]
    idle_timeout_seconds: Seconds
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"]
    resources: Resources
    security_context: Kubernetes


class Head(RayPod):
    enable_in_tree_autoscaling: bool
    autoscaler_options: AutoscalerOptions


class Budget(Node):
    enabled: bool
    max_unavailable: int | str


class Worker(RayPod):
    """Pods of a pool: one pod for one group, with a GPU for each of its ranks."""

    gpu_resource: str | None = Field(default=None, description="name under which the nodes offer their GPUs; empty on CPU nodes")
    replicas: Count | None = Field(default=None, description="unset = minReplicas")
    min_replicas: Count | None = Field(default=None, description="unset = the pool's replicas.min")
    max_replicas: Count | None = Field(default=None, description="unset = the pool's replicas.max")
    idle_timeout_seconds: Seconds | None = Field(default=None, description="a pod without a group goes after so long")
    pod_disruption_budget: Budget | None = None


class RedisPassword(Node):
    existing_secret: str
    key: Text


class GcsFaultTolerance(Node):
    """Lets a new head find the pools as they are. Without it a lost head takes the cluster with it."""

    enabled: bool
    redis_address: str = Field(description="redis://host:port of a Redis that outlives the head")
    redis_password: RedisPassword
    external_storage_namespace: str = Field(description="empty = the release's name")


class RayService(Node):
    """Used with kind: RayService, where KubeRay starts a second cluster beside the first one and switches when it is ready."""

    upgrade_strategy: Literal["NewCluster", "None"]
    service_unhealthy_second_threshold: Seconds
    deployment_unhealthy_second_threshold: Seconds


class Create(Node):
    enabled: bool
    size: Quantity
    storage_class_name: str
    access_modes: list[Literal["ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce"]]


class Claim(Node):
    claim_name: str = Field(description="of a claim that is there; empty = the chart's own")
    create: Create


class HostPath(Node):
    path: Text


class Download(Node):
    repository: Text
    revision: str = Field(description="a commit; empty = the main branch of that day")
    size: Quantity = Field(description="room that the pod's volume must have")
    token_secret: str = Field(description="Secret with the key HF_TOKEN; empty for public repositories")
    resources: Resources


class Weights(Node):
    source: Literal["pvc", "hostPath", "download"]
    mount_path: Text = Field(description="model.path must lie in it")
    read_only: bool = Field(description="true where the FP8 shards are there already or no pool needs them")
    pvc: Claim
    host_path: HostPath
    download: Download
    prepare_timeout_seconds: Seconds


class KernelCache(Node):
    host_path: str = Field(description="folder of the node that keeps compiled kernels; empty = compiled anew in each pod")
    size: Quantity


class Service(Node):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: int = Field(ge=1, le=65535)
    annotations: dict[str, str]


class Autoscaling(Node):
    enabled: bool
    min_replicas: Annotated[int, Field(ge=1)]
    max_replicas: Annotated[int, Field(ge=1)]
    metric: Text = Field(description="per-pod metric that the custom metrics API serves")
    target_streams: Annotated[int, Field(ge=1)]


class Deployment(Pod):
    replicas: Annotated[int, Field(ge=1)]
    service: Service
    pod_disruption_budget: Budget
    autoscaling: Autoscaling
    pre_stop_sleep_seconds: Seconds = Field(description="between leaving the Service and the start of the drain")


class Frontend(Deployment):
    enabled: bool
    api_keys_secret: str = Field(description="Secret with the key keys.yaml; empty = open to whoever reaches the port")


class Deployments(Node):
    router: Deployment
    frontend: Frontend


class ServiceAccount(Node):
    create: bool
    name: str
    annotations: dict[str, str]


class Enabled(Node):
    enabled: bool


class NetworkPolicy(Node):
    """Only pods of the release reach Ray, the directory and transfers. Empty `clientFrom` = any source may call router and frontend."""

    enabled: bool
    client_from: list[Kubernetes]
    metrics_from: list[Kubernetes]
    operator_from: list[Kubernetes]


class ExistingSecret(Node):
    existing_secret: str = Field(description="empty = made once by the chart")


class OptionalSecret(ExistingSecret):
    enabled: bool


class IssuerRef(Node):
    name: str
    kind: Literal["Issuer", "ClusterIssuer"]
    group: Text


class CertManager(Node):
    enabled: bool
    issuer_ref: IssuerRef
    duration: Text
    renew_before: Text


class Tls(OptionalSecret):
    mutual: Literal["all", "internal", "none"] = Field(description="as security.tls.mutual")
    dns_names: list[str] = Field(description="beside the Services' own names")
    cert_manager: CertManager


class Secrets(Node):
    transfer_key: ExistingSecret
    ray_auth: OptionalSecret
    tokens: OptionalSecret
    tls: Tls


class Scrape(Node):
    enabled: bool
    interval: Text
    labels: dict[str, str]


class Labelled(Node):
    enabled: bool
    labels: dict[str, str]


class Monitoring(Node):
    service_monitor: Scrape
    pod_monitor: Scrape
    dashboards: Labelled
    prometheus_rule: Labelled


class ChartValues(Node):
    """What stands in `values.yaml` beside the config tree."""

    kind: Literal["RayCluster", "RayService"]
    name_override: str
    fullname_override: str
    image: Image
    image_pull_secrets: list[Kubernetes]
    ray_version: Text
    head: Head
    worker: Worker
    additional_worker_groups: dict[str, Worker] = Field(description="by pool: what its pods have otherwise than `worker` says")
    gcs_fault_tolerance: GcsFaultTolerance
    ray_service: RayService
    weights: Weights
    kernel_cache: KernelCache
    deployments: Deployments
    service_account: ServiceAccount
    network_policy: NetworkPolicy
    secrets: Secrets
    monitoring: Monitoring


CONFIG_KEYS = tuple(Config.model_fields)
