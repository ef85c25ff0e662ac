//! The machine that a run computes on.

use serde::{Deserialize, Serialize};
use std::fs;

/// Where a run computed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Operating system and architecture, such as `linux x86_64`.
    pub platform: String,
    /// The processor's name; `unknown` where the system does not say.
    pub cpu: String,
    /// Vector extensions that the processor has, of those that kernels choose by. Another set can mean other rounding.
    pub instruction_sets: Vec<String>,
    /// Processors that this process may use.
    pub cpus: usize,
    /// Device asked for, such as `cpu` or `cuda:0`.
    pub device: String,
    /// The device as its driver names it; the processor's name for `cpu`.
    pub device_name: String,
    /// Threads that compute.
    pub threads: usize,
}

impl Machine {
    /// This machine, with the CPU as the device.
    pub fn cpu(threads: usize) -> Self {
        let cpu = cpu_name().unwrap_or_else(|| "unknown".into());
        Self {
            platform: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            instruction_sets: instruction_sets(),
            cpus: std::thread::available_parallelism().map_or(1, |n| n.get()),
            device: "cpu".into(),
            device_name: cpu.clone(),
            cpu,
            threads,
        }
    }
}

fn cpu_name() -> Option<String> {
    let info = fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

macro_rules! detected {
    ($detect:tt: $($name:tt)*) => {
        [$(($name, std::arch::$detect!($name))),*]
    };
}

fn instruction_sets() -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    let sets = detected!(is_x86_feature_detected: "sse4.1" "sse4.2" "avx" "avx2" "fma" "f16c" "avxvnni" "avx512f"
        "avx512bw" "avx512cd" "avx512dq" "avx512vl" "avx512vnni" "avx512bf16" "avx512fp16");
    #[cfg(target_arch = "aarch64")]
    let sets = detected!(is_aarch64_feature_detected: "neon" "fp16" "fhm" "dotprod" "i8mm" "bf16" "sve" "sve2");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let sets: [(&str, bool); 0] = [];
    sets.into_iter().filter(|(_, present)| *present).map(|(name, _)| name.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::cpu(3);
        assert_eq!((machine.device.as_str(), machine.threads), ("cpu", 3));
        assert!(machine.platform.contains(std::env::consts::ARCH) && machine.cpus >= 1);
        #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
        {
            let flags = fs::read_to_string("/proc/cpuinfo").unwrap();
            let has =
                |flag: &str| flags.lines().any(|line| line.starts_with("flags") && line.contains(&format!(" {flag} ")));
            assert_eq!(machine.instruction_sets.contains(&"avx2".to_string()), has("avx2"));
            assert_eq!(machine.instruction_sets.contains(&"avx512f".to_string()), has("avx512f"));
        }
    }
}
