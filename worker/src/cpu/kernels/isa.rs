//! Which instructions compute: found at run time, named in the bit domain, and the floating-point mode that goes with
//! it.

use std::fmt;

/// An instruction set the kernels are compiled for. Results of different sets may differ in bits: a group never mixes
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AMX with `TDPBF16PS`, and AVX-512 BF16 for all but products.
    Amx,
    /// AVX-512 with `VDPBF16PS`.
    Avx512Bf16,
    /// AVX2, FMA and F16C; the same bits as [`Isa::Portable`].
    Avx2,
    /// Plain Rust.
    Portable,
}

/// Names an instruction set to use in place of the best one: `amx`, `avx512bf16`, `avx2` or `portable`.
pub const ISA_VARIABLE: &str = "LOOPLANE_CPU_ISA";

/// An instruction set was asked for that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum IsaError {
    /// Not a name of an instruction set.
    #[error("{ISA_VARIABLE}={0:?} is no instruction set; use amx, avx512bf16, avx2 or portable")]
    Unknown(String),
    /// The processor lacks it.
    #[error("this processor has no {0}, or the system does not permit it; unset {ISA_VARIABLE} or use portable")]
    Missing(Isa),
}

impl Isa {
    /// All sets, the best one first.
    pub const ALL: [Self; 4] = [Isa::Amx, Isa::Avx512Bf16, Isa::Avx2, Isa::Portable];

    /// The best set this processor has, or the one [`ISA_VARIABLE`] names.
    ///
    /// # Errors
    /// The variable names no set, or one the processor lacks.
    pub fn choose() -> Result<Self, IsaError> {
        match std::env::var(ISA_VARIABLE) {
            Ok(name) if !name.is_empty() => Self::parse(&name)?.checked(),
            _ => Ok(Self::best()),
        }
    }

    /// The best set this processor has.
    pub fn best() -> Self {
        Self::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Portable)
    }

    /// `self`, if this processor has it.
    ///
    /// # Errors
    /// [`IsaError::Missing`] otherwise.
    pub fn checked(self) -> Result<Self, IsaError> {
        if self.available() { Ok(self) } else { Err(IsaError::Missing(self)) }
    }

    fn parse(name: &str) -> Result<Self, IsaError> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| IsaError::Unknown(name.to_owned()))
    }

    /// The name in the bit domain and in [`ISA_VARIABLE`].
    pub fn name(self) -> &'static str {
        match self {
            Isa::Amx => "amx",
            Isa::Avx512Bf16 => "avx512bf16",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }

    /// Whether this processor has it. The answer is cached: asking costs a few loads.
    pub fn available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Avx512Bf16.available() && *amx::USABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod amx {
    //! Whether the processor has AMX, and the system lets this process use its registers.

    use std::arch::x86_64::__cpuid_count;
    use std::sync::LazyLock;

    /// Asked once: the permission is the process's, and stays.
    pub(super) static USABLE: LazyLock<bool> = LazyLock::new(|| has() && permitted());

    fn has() -> bool {
        const LEAF_FEATURES: u32 = 7;
        const BF16: u32 = 1 << 22;
        const TILE: u32 = 1 << 24;
        __cpuid_count(LEAF_FEATURES, 0).edx & (BF16 | TILE) == BF16 | TILE
    }

    /// Linux keeps what is in these registers only for processes that asked for it (5.16 and later).
    #[cfg(target_os = "linux")]
    fn permitted() -> bool {
        const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
        const XFEATURE_XTILEDATA: libc::c_ulong = 18;
        // SAFETY: two numbers go in and none comes out; who has no such call says so.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
    }

    #[cfg(not(target_os = "linux"))]
    fn permitted() -> bool {
        false
    }
}

/// Flushes denormals to zero on this thread until dropped, then restores the mode found.
///
/// Every thread that computes holds one: denormal operands slow fp32 arithmetic about tenfold, and a thread in another
/// mode would compute other bits. On architectures other than x86-64 the default mode stays.
#[derive(Debug)]
pub struct FlushDenormals {
    found: u32,
    /// The mode belongs to the thread: the guard must not leave it.
    _thread_bound: std::marker::PhantomData<*const ()>,
}

impl FlushDenormals {
    /// Switches the mode of the calling thread.
    pub fn enter() -> Self {
        const FLUSH_TO_ZERO: u32 = 1 << 15;
        const DENORMALS_ARE_ZERO: u32 = 1 << 6;
        let found = control::read();
        control::write(found | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO);
        Self { found, _thread_bound: std::marker::PhantomData }
    }
}

impl Drop for FlushDenormals {
    fn drop(&mut self) {
        control::write(self.found);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
mod control {
    //! MXCSR, the register of the floating-point mode.

    pub(super) fn read() -> u32 {
        let mut mode = 0u32;
        // SAFETY: `stmxcsr` stores four bytes to the local it is given and touches nothing else.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mode, options(nostack, preserves_flags)) };
        mode
    }

    pub(super) fn write(mode: u32) {
        // SAFETY: only the flush bits change against the mode in force; rounding and exception masks stay. Arithmetic
        // the compiler moves across this line differs at most in how it treats denormals.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod control {
    pub(super) fn read() -> u32 {
        0
    }

    pub(super) fn write(_mode: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for isa in Isa::ALL {
            assert_eq!(Isa::parse(isa.name()), Ok(isa));
        }
        assert_eq!(Isa::parse("sse"), Err(IsaError::Unknown("sse".to_owned())));
        assert!(Isa::best().available());
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn denormals_are_flushed_only_while_held() {
        let half = |x: f32| std::hint::black_box(std::hint::black_box(x) * 0.5);
        assert!(half(f32::MIN_POSITIVE) > 0.0);
        {
            let _mode = FlushDenormals::enter();
            assert_eq!(half(f32::MIN_POSITIVE), 0.0);
        }
        assert!(half(f32::MIN_POSITIVE) > 0.0);
    }
}
