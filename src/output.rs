//! What a command says: answers on standard output, the error that ends it on standard error. Either may be closed,
//! which takes nothing away from the work itself.

use std::{
    io::{self, Write},
    process::ExitCode,
};

/// Exit code of a command that failed.
pub const EXIT_FAILURE: u8 = 1;

/// A line for the user.
pub fn say(line: &str) {
    let _ = writeln!(io::stdout(), "{line}");
}

/// The exit code of a command that has ended so; its error is told.
pub fn finish(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error, EXIT_FAILURE),
    }
}

/// Tells an error with all its causes in one line. Returns `code`.
pub fn report(error: &anyhow::Error, code: u8) -> ExitCode {
    let _ = writeln!(io::stderr(), "looplane: {error:#}");
    ExitCode::from(code)
}
