//! How fast a server's memory can be read: what only the user knows, or `looplane bench` has measured.

use std::path::PathBuf;
use std::str::FromStr;

use anyhow::Context;
use serde_json::Value;

/// `--read-limit` on the command line: GB/s, or a file that says it.
#[derive(Debug, Clone, PartialEq)]
pub enum ReadLimitArg {
    /// GB/s (10^9) of all memory that the server's ranks read.
    GbPerS(f64),
    /// A report of `looplane bench --json` for the same group on the same machine.
    Bench(PathBuf),
}

impl FromStr for ReadLimitArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<f64>() {
            Ok(gb_s) if gb_s > 0.0 && gb_s.is_finite() => Ok(Self::GbPerS(gb_s)),
            Ok(_) => Err(format!("'{text}' GB/s is no rate: give more than 0")),
            Err(_) => Ok(Self::Bench(text.into())),
        }
    }
}

impl ReadLimitArg {
    /// In GB/s (10^9), of all memory that the group's ranks read.
    ///
    /// # Errors
    /// A file that does not say it.
    pub fn gb_s(&self) -> anyhow::Result<f64> {
        let path = match self {
            Self::GbPerS(gb_s) => return Ok(*gb_s),
            Self::Bench(path) => path,
        };
        let shown = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("--read-limit: cannot read {shown}"))?;
        let report: Value = serde_json::from_str(&text).unwrap_or_default();
        let lacks = |field| format!("--read-limit: {shown} is no report of looplane bench --json (no {field} in it)");
        let measured = report.pointer("/read/best_gb_s").and_then(Value::as_f64);
        let measured = measured.with_context(|| lacks("read.best_gb_s"))?;
        let ranks = report["tensor_parallel"].as_f64().with_context(|| lacks("tensor_parallel"))?;
        // On CPUs all ranks read the same memory, and it was measured with the threads of all; on GPUs each has its
        // own.
        match report["device"].as_str().with_context(|| lacks("device"))? {
            "cuda" => Ok(measured * ranks),
            _ => Ok(measured),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_or_what_bench_measured() {
        assert_eq!("35.5".parse(), Ok(ReadLimitArg::GbPerS(35.5)));
        assert!("0".parse::<ReadLimitArg>().is_err() && "inf".parse::<ReadLimitArg>().is_err());
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let of = |text: &str| {
            std::fs::write(file.path(), text).expect("writable");
            let limit: ReadLimitArg = file.path().to_str().expect("UTF-8").parse().expect("a path");
            limit.gb_s().map_err(|error| error.to_string())
        };
        assert_eq!(of(r#"{"device": "cpu", "tensor_parallel": 2, "read": {"best_gb_s": 40.0}}"#), Ok(40.0));
        assert_eq!(of(r#"{"device": "cuda", "tensor_parallel": 4, "read": {"best_gb_s": 4600.0}}"#), Ok(18_400.0));
        assert!(of("{}").is_err_and(|error| error.contains("no read.best_gb_s in it")));
        assert!(of("none").is_err());
        assert!(ReadLimitArg::Bench("/no/such/file".into()).gb_s().is_err());
    }
}
