//! The machine that a run computes on.

use crate::device;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

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
    /// Memory of the machine; nothing where the system does not say.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The device's driver as the device names it; a CPU has none, and says so. Nothing where it is not known.
    #[serde(default)]
    pub driver: Option<String>,
    /// The NVIDIA devices of the machine with the version of their kernel driver, used or not.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// The variables of the environment that change what is computed, or where, as far as they are set.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
}

/// Variables that this program, its thread pool, its allocator and the drivers of its devices read.
const ENVIRONMENT: [&str; 12] = [
    "TUNEHOST_ISA",
    "RAYON_NUM_THREADS",
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "WGPU_ADAPTER_NAME",
    "WGPU_BACKEND",
    "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES",
    "CUBECL_WGPU_DEFAULT_DEVICE",
    "CUBECL_AUTOTUNE_LEVEL",
];

/// Where NVIDIA's kernel driver says what it is and which devices it has.
const NVIDIA: &str = "/proc/driver/nvidia";

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
            memory_bytes: meminfo("MemTotal:"),
            driver: Some("none: a CPU runs the program's own code".into()),
            gpus: nvidia_gpus(Path::new(NVIDIA)),
            environment: environment(),
        }
    }
}

/// Memory of the device `name` that is free for a run; nothing where that is not known. On a CPU it is what the system can
/// give without swapping, or what is left of the process's control group (cgroup v2) where that is less.
pub fn free_memory_bytes(name: &str) -> Option<u64> {
    if name != "cpu" {
        return device::free_memory_bytes(&device::card(name).ok()??);
    }
    let available = meminfo("MemAvailable:")?;
    Some(control_group_bytes().map_or(available, |left| left.min(available)))
}

/// Memory that this process holds now; nothing where the system does not tell.
pub fn resident_bytes() -> Option<usize> {
    status_bytes("VmRSS:")
}

/// The most memory that this process held; nothing where the system does not tell.
pub fn peak_resident_bytes() -> Option<usize> {
    status_bytes("VmHWM:")
}

/// Bytes of a line of `/proc/self/status`.
fn status_bytes(name: &str) -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches(" kB").parse::<usize>().ok()? * 1024)
}

/// Bytes of a line of `/proc/meminfo`.
fn meminfo(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

fn environment() -> BTreeMap<String, String> {
    let set = ENVIRONMENT.iter().filter_map(|name| Some((name.to_string(), std::env::var(name).ok()?)));
    set.collect()
}

/// Name and driver of each device in the folder `proc`; the driver alone where it names none, as in a container.
fn nvidia_gpus(proc: &Path) -> Vec<String> {
    let Ok(version) = fs::read_to_string(proc.join("version")) else { return Vec::new() };
    // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 ...", with other words in other flavours.
    let number = |word: &&str| word.contains('.') && word.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    let driver = version.lines().next().and_then(|line| line.split_whitespace().find(number)).unwrap_or("unknown");
    let folders = fs::read_dir(proc.join("gpus")).into_iter().flatten().flatten();
    let model = |folder: fs::DirEntry| {
        let text = fs::read_to_string(folder.path().join("information")).ok()?;
        Some(text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim().to_string())
    };
    let mut models: Vec<String> = folders.filter_map(model).collect();
    models.sort();
    if models.is_empty() {
        models.push("no device named".into());
    }
    models.into_iter().map(|model| format!("{model}, NVIDIA driver {driver}")).collect()
}

fn control_group_bytes() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let number = |name: &str| {
        let text = fs::read_to_string(Path::new("/sys/fs/cgroup").join(group).join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    // Pages of files count as used, and are given up when memory is asked for.
    let stat = fs::read_to_string(Path::new("/sys/fs/cgroup").join(group).join("memory.stat")).ok()?;
    let files = stat.lines().find_map(|line| line.strip_prefix("file "))?.trim().parse::<u64>().ok()?;
    Some(number("memory.max")?.saturating_sub(number("memory.current")?.saturating_sub(files)))
}

/// Free disk of the folder `path`, or of the nearest folder above it that is there; nothing where the system does not tell.
pub fn free_disk_bytes(path: &Path) -> Option<u64> {
    let path = std::path::absolute(path).ok()?;
    let there = path.ancestors().find(|folder| folder.exists())?;
    #[cfg(unix)]
    return rustix::fs::statvfs(there).ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    #[cfg(not(unix))]
    {
        let _ = there;
        None
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
    #[cfg(target_os = "linux")]
    fn free_memory_and_disk_are_told() {
        let memory = free_memory_bytes("cpu").unwrap();
        assert!(memory > 1 << 20 && memory < 1 << 50, "{memory}");
        assert_eq!(free_memory_bytes("cuda:0"), None);
        let here = free_disk_bytes(Path::new(".")).unwrap();
        assert!(here > 0 && here < 1 << 60, "{here}");
        assert!(free_disk_bytes(&std::env::temp_dir().join("not/there/yet")).is_some());
    }

    #[test]
    fn gpus_are_named_with_their_driver() {
        let proc = tempfile::tempdir().unwrap();
        let found = || nvidia_gpus(proc.path());
        assert_eq!(found(), [""; 0]);
        for (flavour, version) in [
            ("UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
            ("UNIX Open Kernel Module for x86_64  570.133.20  Release Build  (a@b)", "570.133.20"),
        ] {
            let text = format!("NVRM version: NVIDIA {flavour}\nGCC version:  gcc version 12.2.0\n");
            fs::write(proc.path().join("version"), text).unwrap();
            assert_eq!(found(), [format!("no device named, NVIDIA driver {version}")]);
        }
        let device = proc.path().join("gpus/0000:01:00.0");
        fs::create_dir_all(&device).unwrap();
        fs::write(device.join("information"), "Model: \t\t NVIDIA RTX 6000\nIRQ:   \t\t 95\n").unwrap();
        assert_eq!(found(), ["NVIDIA RTX 6000, NVIDIA driver 570.133.20"]);
    }

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
