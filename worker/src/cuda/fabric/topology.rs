//! Which GPUs of this machine reach each other's memory, and how.

use std::fmt;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice_P2PAttribute as Attribute};

use crate::cuda::device::gpu::probe;
use crate::cuda::error::{CudaError, checked};

/// Names a GPU for good, in every process.
pub type Uuid = [u8; 16];

/// A GPU that this process sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its number here.
    pub ordinal: usize,
    /// What it is.
    pub name: String,
    /// Its name for good.
    pub uuid: Uuid,
}

/// How a GPU reaches memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// It is its own.
    Own,
    /// It is another GPU's that it has access to.
    Peer {
        /// The driver's rank of the link among those of the machine; 0 is the fastest.
        performance: i32,
        /// Atomics work over it, as they do over NVLink and not over PCIe.
        atomics: bool,
    },
}

/// What the driver says of a pair of GPUs.
#[derive(Debug, Clone, Copy)]
struct Answers {
    /// `cuDeviceCanAccessPeer`.
    can_access: bool,
    /// `CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED`.
    supported: bool,
    performance: i32,
    atomics: bool,
}

impl Device {
    /// All GPUs that this process sees.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn all() -> Result<Vec<Self>, CudaError> {
        let count = checked("cuDeviceGetCount", result::device::get_count())?;
        (0..count)
            .map(|ordinal| {
                let device = checked("cuDeviceGet", result::device::get(ordinal))?;
                let uuid = checked("cuDeviceGetUuid", result::device::get_uuid(device))?;
                Ok(Self {
                    ordinal: ordinal as usize,
                    name: checked("cuDeviceGetName", result::device::get_name(device))?,
                    uuid: uuid.bytes.map(|byte| byte as u8),
                })
            })
            .collect()
    }

    /// How this GPU reaches the memory of another.
    ///
    /// # Errors
    /// It does not.
    pub fn link(&self, to: &Self) -> Result<Link, CudaError> {
        if self.uuid == to.uuid {
            return Ok(Link::Own);
        }
        self.judge(to, self.ask(to)?)
    }

    #[allow(unsafe_code)]
    fn ask(&self, to: &Self) -> Result<Answers, CudaError> {
        let from = checked("cuDeviceGet", result::device::get(self.ordinal as i32))?;
        let peer = checked("cuDeviceGet", result::device::get(to.ordinal as i32))?;
        let mut can_access = 0;
        // SAFETY: the devices are ones that the driver named, and the pointer is to a live integer.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&mut can_access, from, peer) };
        checked("cuDeviceCanAccessPeer", asked.result())?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: as above.
            let asked = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, from, peer) };
            checked("cuDeviceGetP2PAttribute", asked.result()).map(|()| value)
        };
        Ok(Answers {
            can_access: can_access != 0,
            supported: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
            performance: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
            atomics: attribute(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
        })
    }

    fn judge(&self, to: &Self, answers: Answers) -> Result<Link, CudaError> {
        if !(answers.can_access && answers.supported) {
            return Err(CudaError::Peers(format!(
                "{self} cannot map the memory of {to}: the driver reports no peer access"
            )));
        }
        Ok(Link::Peer { performance: answers.performance, atomics: answers.atomics })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({}, {})", self.ordinal, self.name, uuid_text(&self.uuid))
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => write!(f, "in its own memory"),
            Self::Peer { performance, atomics } => {
                let atomics = if *atomics { "with" } else { "without" };
                write!(f, "by peer access of performance rank {performance}, {atomics} atomics")
            }
        }
    }
}

/// As nvidia-smi writes it.
pub fn uuid_text(uuid: &Uuid) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The GPU of this name.
///
/// # Errors
/// This process does not see it.
pub fn find<'a>(devices: &'a [Device], uuid: &Uuid, rank: usize) -> Result<&'a Device, CudaError> {
    devices.iter().find(|device| device.uuid == *uuid).ok_or_else(|| {
        let seen: Vec<_> = devices.iter().map(Device::to_string).collect();
        let uuid = uuid_text(uuid);
        CudaError::Peers(format!(
            "rank {rank} is on {uuid}, which this worker does not see; it sees {}",
            seen.join(", ")
        ))
    })
}

/// Whether the GPUs of a group, one for each rank from number `first` on, reach each other: what can be known before
/// anything is loaded.
///
/// # Errors
/// The first pair that does not, or a GPU that is not there.
pub fn survey(first: usize, ranks: usize) -> Result<(), CudaError> {
    // The last one's answer holds for all that are before it.
    probe((first + ranks).saturating_sub(1))?;
    let devices = &Device::all()?[first..first + ranks];
    let mut pairs = devices.iter().flat_map(|from| devices.iter().map(move |to| (from, to)));
    pairs.try_for_each(|(from, to)| from.link(to).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(ordinal: usize) -> Device {
        Device { ordinal, name: "NVIDIA H200".into(), uuid: std::array::from_fn(|i| (16 * ordinal + i) as u8) }
    }

    #[test]
    fn a_pair_without_access_is_refused_with_both_names_and_what_to_do() {
        let (from, to) = (device(0), device(1));
        let good = Answers { can_access: true, supported: true, performance: 0, atomics: true };
        let link = from.judge(&to, good).unwrap();
        assert_eq!(link.to_string(), "by peer access of performance rank 0, with atomics");
        for answers in [Answers { can_access: false, ..good }, Answers { supported: false, ..good }] {
            let refusal = from.judge(&to, answers).unwrap_err().to_string();
            for part in [
                "GPU 0 (NVIDIA H200, GPU-00010203-0405-0607-0809-0a0b0c0d0e0f) cannot map the memory of GPU 1 (NVIDIA \
                 H200, GPU-10111213-",
                "CUDA_VISIBLE_DEVICES",
                "smaller --tp",
            ] {
                assert!(refusal.contains(part), "{refusal}");
            }
        }
    }

    #[test]
    fn a_gpu_reaches_itself_without_asking_and_a_hidden_one_is_refused() {
        let devices = [device(0), device(1)];
        assert_eq!(devices[0].link(&devices[0]), Ok(Link::Own));
        assert_eq!(find(&devices, &devices[1].uuid, 1), Ok(&devices[1]));
        let refusal = find(&devices, &device(2).uuid, 3).unwrap_err().to_string();
        assert!(refusal.contains("rank 3 is on GPU-20212223-") && refusal.contains("it sees GPU 0"), "{refusal}");
    }
}
