"""vLLM's platform of CPU workers that communicate by shmring. vLLM imports this module by the class' name."""

from vllm.platforms.cpu import CpuPlatform


class Platform(CpuPlatform):  # type: ignore[misc, unused-ignore]
    """The CPU, with another class of communicators."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """Return the name of the class that vLLM makes for each group."""
        return "shmring.adapters._vllm_communicator.Communicator"
