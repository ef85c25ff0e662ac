//! A graphics card as Linux shows it: its device nodes, which processes have them open, and how much of its memory is free.
//!
//! Everything is read below a root, which is `/` but in tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A graphics card of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    root: PathBuf,
    pci: Option<String>,
}

/// Who has a card open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders {
    /// Processes other than this one, by pid, with what they call themselves.
    pub processes: Vec<(u32, String)>,
    /// Processes that could not be looked at, since they are another user's.
    pub unseen: usize,
}

impl Card {
    /// The card at the address `pci` (`0000:01:00.0`); where that is not known, whichever cards there are.
    pub fn new(root: &Path, pci: Option<String>) -> Self {
        Self { root: root.into(), pci }
    }

    /// Its address on the PCI bus, where that is known.
    pub fn pci(&self) -> Option<&str> {
        self.pci.as_deref()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// The names that the card has among the devices: those of its kernel driver's compute and render nodes.
    pub fn nodes(&self) -> BTreeSet<PathBuf> {
        let Some(pci) = &self.pci else {
            let nvidia = names(&self.at("dev")).into_iter().filter(|name| numbered(name, "nvidia"));
            let render = names(&self.at("dev/dri")).into_iter().filter(|name| numbered(name, "renderD"));
            return nvidia
                .map(|n| Path::new("/dev").join(n))
                .chain(render.map(|n| Path::new("/dev/dri").join(n)))
                .collect();
        };
        let render = names(&self.at(&format!("sys/bus/pci/devices/{pci}/drm")));
        let render = render.into_iter().filter(|name| numbered(name, "renderD"));
        let information = fs::read_to_string(self.at(&format!("proc/driver/nvidia/gpus/{pci}/information")));
        let minor = information.ok().and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse::<u32>().ok())
        });
        let nvidia = minor.map(|minor| PathBuf::from(format!("/dev/nvidia{minor}")));
        render.map(|name| Path::new("/dev/dri").join(name)).chain(nvidia).collect()
    }

    /// Which other processes have one of the card's nodes open, or are among those that its driver says are `computing` on it.
    pub fn holders(&self, computing: &[u32]) -> Holders {
        let nodes = self.nodes();
        let mut holders = Holders::default();
        if nodes.is_empty() {
            return holders;
        }
        let pids = names(&self.at("proc")).into_iter().filter_map(|name| name.parse::<u32>().ok());
        for pid in pids.filter(|pid| *pid != std::process::id()) {
            let process = self.at(&format!("proc/{pid}"));
            let open = fs::read_dir(process.join("fd"));
            let is_computing = computing.contains(&pid);
            // One that has ended meanwhile holds nothing.
            holders.unseen += usize::from(open.is_err() && !is_computing && process.exists());
            let mut open = open.into_iter().flatten().flatten().filter_map(|link| fs::read_link(link.path()).ok());
            if is_computing || open.any(|path| nodes.contains(&path)) {
                let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
                holders.processes.push((pid, name.trim().to_string()));
            }
        }
        holders.processes.sort();
        holders
    }

    /// Free memory of the card, where its kernel driver tells as amdgpu does.
    pub fn free_memory_bytes(&self) -> Option<u64> {
        let device = self.at(&format!("sys/bus/pci/devices/{}", self.pci.as_ref()?));
        let number = |name: &str| fs::read_to_string(device.join(name)).ok()?.trim().parse::<u64>().ok();
        number("mem_info_vram_total")?.checked_sub(number("mem_info_vram_used")?)
    }
}

/// The names in a folder; none where it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Whether a name is `kind` and a number.
fn numbered(name: &str, kind: &str) -> bool {
    name.strip_prefix(kind).is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A machine with an NVIDIA card at 01:00.0 and an AMD card at 02:00.0.
    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for node in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "dri/renderD128", "dri/renderD129", "dri/card0"] {
            write(&format!("dev/{node}"), "");
        }
        write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: \t\t X\nDevice Minor: \t 1\n");
        for (pci, node) in [("0000:01:00.0", "renderD128"), ("0000:02:00.0", "renderD129")] {
            write(&format!("sys/bus/pci/devices/{pci}/drm/{node}/dev"), "226:128\n");
            write(&format!("sys/bus/pci/devices/{pci}/drm/card0/dev"), "226:0\n");
        }
        write("sys/bus/pci/devices/0000:02:00.0/mem_info_vram_total", "17163091968\n");
        write("sys/bus/pci/devices/0000:02:00.0/mem_info_vram_used", "163091968\n");
        root
    }

    fn process(root: &Path, pid: u32, name: &str, open: &[&str]) {
        let folder = root.join(format!("proc/{pid}"));
        fs::create_dir_all(folder.join("fd")).unwrap();
        fs::write(folder.join("comm"), format!("{name}\n")).unwrap();
        open.iter().enumerate().for_each(|(i, path)| symlink(path, folder.join(format!("fd/{i}"))).unwrap());
    }

    fn card(root: &Path, pci: Option<&str>) -> Card {
        Card::new(root, pci.map(String::from))
    }

    #[test]
    fn a_card_is_known_by_its_nodes() {
        let root = machine();
        let nodes = |pci: Option<&str>| {
            let nodes = card(root.path(), pci).nodes();
            nodes.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(nodes(Some("0000:01:00.0")), ["/dev/dri/renderD128", "/dev/nvidia1"]);
        assert_eq!(nodes(Some("0000:02:00.0")), ["/dev/dri/renderD129"]);
        assert_eq!(nodes(None), ["/dev/dri/renderD128", "/dev/dri/renderD129", "/dev/nvidia0", "/dev/nvidia1"]);
        assert_eq!(nodes(Some("0000:09:00.0")), [""; 0]);
    }

    #[test]
    fn who_has_it_open_is_told_and_who_could_not_be_looked_at_is_counted() {
        let root = machine();
        process(root.path(), 17, "python3", &["/dev/null", "/dev/nvidia1", "socket:[9]"]);
        process(root.path(), 18, "Xorg", &["/dev/dri/renderD129", "/dev/dri/card0"]);
        process(root.path(), 19, "bash", &["/dev/pts/0", "/dev/nvidiactl"]);
        process(root.path(), std::process::id(), "tunehost", &["/dev/nvidia1", "/dev/dri/renderD129"]);
        // Without its folder of open files, as another user's that may not be read.
        fs::create_dir_all(root.path().join("proc/20")).unwrap();
        let held = |pci: Option<&str>| card(root.path(), pci).holders(&[]);
        let (python, xorg) = ((17, "python3".to_string()), (18, "Xorg".to_string()));
        assert_eq!(held(Some("0000:01:00.0")), Holders { processes: vec![python.clone()], unseen: 1 });
        assert_eq!(held(Some("0000:02:00.0")), Holders { processes: vec![xorg.clone()], unseen: 1 });
        assert_eq!(held(None).processes, [python.clone(), xorg]);
        assert_eq!(held(Some("0000:09:00.0")), Holders::default());
        // What the driver tells counts, also of a process that could not be looked at.
        fs::write(root.path().join("proc/20/comm"), "trainer\n").unwrap();
        let told = card(root.path(), Some("0000:01:00.0")).holders(&[20, 17, std::process::id()]);
        assert_eq!(told, Holders { processes: vec![python, (20, "trainer".into())], unseen: 0 });
    }

    #[test]
    fn free_memory_is_that_of_the_card() {
        let root = machine();
        let free = |pci: Option<&str>| card(root.path(), pci).free_memory_bytes();
        assert_eq!(free(Some("0000:02:00.0")), Some(17_000_000_000));
        assert_eq!((free(Some("0000:01:00.0")), free(None)), (None, None));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_can_be_looked_at() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = |pid: u32| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let mut links = open(std::process::id()).filter_map(|link| fs::read_link(link.path()).ok());
        assert!(links.any(|path| path == file.path()), "open files are links in /proc");
    }
}
