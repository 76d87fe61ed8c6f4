//! Near which cores a GPU is, on machines whose memory is in several NUMA nodes.
//!
//! Linux gives a thread memory of the node on whose core it runs when it first touches a page, and a thread begins on
//! the cores that the one that started it is bound to. So a rank whose threads are bound to the cores of its GPU's node
//! before they allocate has its buffers there, too, and copies do not cross from one node to another.

use std::fmt;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Where Linux tells of devices and nodes.
pub const SYSFS: &str = "/sys";

/// The node that a GPU is attached to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    /// Its number.
    pub node: usize,
    /// Its cores.
    pub cores: Vec<usize>,
    /// The same, as the system writes them.
    list: String,
}

/// Why a rank is bound to no node.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unbound {
    /// There is nothing to choose.
    #[error("the machine has one NUMA node")]
    OneNode,
    /// As virtual machines have it.
    #[error("{0} has no NUMA node")]
    NoNode(String),
    /// A file is missing, or is not as it should be.
    #[error("{0}")]
    Unreadable(String),
}

impl Home {
    /// The home of a PCI device, named as `0000:1b:00.0`; `sysfs`: [`SYSFS`], but in tests.
    ///
    /// # Errors
    /// Why there is none.
    pub fn of(sysfs: &Path, device: &str) -> Result<Self, Unbound> {
        let read = |path: &Path| {
            let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()));
            text.map(|text| text.trim().to_owned()).map_err(Unbound::Unreadable)
        };
        let list = |path: &Path| {
            let text = read(path)?;
            let numbers = numbers(&text).ok_or_else(|| format!("{}: {text:?} is no list", path.display()));
            numbers.map(|numbers| (numbers, text)).map_err(Unbound::Unreadable)
        };
        let nodes = sysfs.join("devices/system/node");
        if list(&nodes.join("online"))?.0.len() < 2 {
            return Err(Unbound::OneNode);
        }
        // The driver may write letters large, the system writes them small.
        let device = device.to_lowercase();
        let node = read(&sysfs.join("bus/pci/devices").join(&device).join("numa_node"))?;
        // -1: the firmware does not say.
        let node: usize = node.parse().map_err(|_| Unbound::NoNode(device))?;
        let (cores, list) = list(&nodes.join(format!("node{node}/cpulist")))?;
        Ok(Self { node, cores, list })
    }

    /// Binds the calling thread, and what it starts from now on, to those of the cores that this process may use.
    ///
    /// # Errors
    /// It may use none of them, or the system refuses.
    pub fn bind(&self) -> std::io::Result<()> {
        let allowed = sched_getaffinity(None)?;
        let mut set = CpuSet::new();
        let near = self.cores.iter().filter(|core| **core < CpuSet::MAX_CPU && allowed.is_set(**core));
        near.for_each(|core| set.set(*core));
        if set.count() == 0 {
            return Err(std::io::Error::other("this process may run on none of them"));
        }
        Ok(sched_setaffinity(None, &set)?)
    }
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NUMA node {}, cores {}", self.node, self.list)
    }
}

/// Binds the calling thread near a GPU, where the machine has several nodes, and says so in the log.
pub fn bind(rank: usize, device: &str) -> Option<Home> {
    let home = match Home::of(Path::new(SYSFS), device) {
        Ok(home) => home,
        Err(reason) => {
            tracing::debug!("rank {rank} runs on any core: {reason}");
            return None;
        }
    };
    match home.bind() {
        Ok(()) => tracing::info!("rank {rank}, whose GPU is {device}, is bound to {home}"),
        Err(error) => tracing::warn!("rank {rank}, whose GPU is {device}, cannot be bound to {home}: {error}"),
    }
    Some(home)
}

/// Numbers as the system lists them: `0-3,8`.
fn numbers(list: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for run in list.split(',').filter(|run| !run.is_empty()) {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        all.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with nodes that have these cores, and devices on nodes.
    fn machine(online: &str, nodes: &[&str], devices: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: String, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, format!("{text}\n")).unwrap();
        };
        write("devices/system/node/online".into(), online);
        for (node, cores) in nodes.iter().enumerate() {
            write(format!("devices/system/node/node{node}/cpulist"), cores);
        }
        for (device, node) in devices {
            write(format!("bus/pci/devices/{device}/numa_node"), node);
        }
        root
    }

    #[test]
    fn a_gpu_has_the_cores_of_its_node() {
        let devices = [("0000:1b:00.0", "0"), ("0000:ab:00.0", "1"), ("0000:cc:00.0", "-1"), ("0000:dd:00.0", "7")];
        let two = machine("0-1", &["0-2,8", "3-5,9,11-12"], &devices);
        let home = |device| Home::of(two.path(), device);
        assert_eq!(home("0000:1b:00.0").unwrap().cores, [0, 1, 2, 8]);
        let second = home("0000:AB:00.0").unwrap();
        assert_eq!((second.node, &second.cores[..]), (1, &[3, 4, 5, 9, 11, 12][..]));
        assert_eq!(second.to_string(), "NUMA node 1, cores 3-5,9,11-12");
        assert_eq!(home("0000:cc:00.0"), Err(Unbound::NoNode("0000:cc:00.0".into())));
        for (device, file) in [("0000:dd:00.0", "node7/cpulist"), ("0000:ee:00.0", "0000:ee:00.0/numa_node")] {
            let reason = home(device).unwrap_err().to_string();
            assert!(reason.contains(file), "{reason}");
        }
        let one = machine("0", &["0-15"], &devices);
        assert_eq!(Home::of(one.path(), "0000:1b:00.0"), Err(Unbound::OneNode));
        let odd = machine("0-x", &[], &[]);
        assert!(Home::of(odd.path(), "0000:1b:00.0").unwrap_err().to_string().contains("\"0-x\" is no list"));
    }

    #[test]
    fn a_bound_thread_and_those_that_it_starts_run_on_those_cores_and_no_others() {
        let allowed = || {
            let set = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect::<Vec<_>>()
        };
        // The last core that there is, beside one that nobody has: what a container sees of a node.
        let last = *allowed().last().unwrap();
        let two = machine("0-1", &[&format!("{last},{}", CpuSet::MAX_CPU + 5), "4000"], &[("a", "0"), ("b", "1")]);
        std::thread::scope(|scope| {
            let bound = scope.spawn(|| {
                Home::of(two.path(), "a").unwrap().bind().unwrap();
                std::thread::spawn(allowed).join().unwrap()
            });
            assert_eq!(bound.join().unwrap(), [last]);
        });
        let before = allowed();
        let refused = Home::of(two.path(), "b").unwrap().bind().unwrap_err().to_string();
        assert_eq!((refused.as_str(), allowed()), ("this process may run on none of them", before));
    }
}
