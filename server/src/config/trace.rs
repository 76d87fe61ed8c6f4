//! Options of traces.

use clap::Args;

use super::ConfigError;
use crate::trace::Otlp;

/// OpenTelemetry's own variables, the first that is set counts; where the collector is.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
/// What is spoken to it.
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];
/// What the server is called there.
const SERVICE: &str = "OTEL_SERVICE_NAME";

/// Where traces go.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// Collector that gets the traces of requests (OTLP over gRPC), such as http://127.0.0.1:4317 [default: that of
    /// OTEL_EXPORTER_OTLP_ENDPOINT, or none]
    #[arg(long, value_name = "URL", env = "LOOPLANE_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
}

impl TraceArgs {
    /// The collector, if there is one.
    pub(super) fn check(self, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Otlp>, ConfigError> {
        let first = |names: [&'static str; 2]| {
            names.into_iter().find_map(|name| Some((name, variable(name).filter(|value| !value.is_empty())?)))
        };
        let given = self.otlp_endpoint.map(|endpoint| ("--otlp-endpoint", endpoint));
        let Some((option, endpoint)) = given.or_else(|| first(ENDPOINTS)) else { return Ok(None) };
        // Libraries begin with http/protobuf where nothing is said; there is no port that speaks both.
        if let Some((option, value)) = first(PROTOCOLS).filter(|(_, protocol)| protocol != "grpc") {
            return Err(ConfigError::Value {
                option,
                value,
                rule: "grpc: nothing else is spoken to a collector".into(),
            });
        }
        let service = variable(SERVICE).filter(|name| !name.is_empty()).unwrap_or_else(|| "looplane".into());
        let otlp = Otlp::new(&endpoint, service);
        otlp.map(Some).map_err(|rule| ConfigError::Value { option, value: endpoint, rule: rule.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(option: Option<&str>, variables: &[(&str, &str)]) -> Result<bool, String> {
        let args = TraceArgs { otlp_endpoint: option.map(str::to_owned) };
        let variable = |name: &str| variables.iter().find(|(of, _)| *of == name).map(|(_, value)| value.to_string());
        args.check(variable).map(|otlp| otlp.is_some()).map_err(|error| error.to_string())
    }

    #[test]
    fn traces_go_nowhere_unless_somebody_says_where() {
        let [endpoint, protocol] = ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"];
        assert_eq!(check(None, &[]), Ok(false));
        assert_eq!(check(None, &[(endpoint, "")]), Ok(false));
        assert_eq!(check(None, &[(protocol, "http/protobuf")]), Ok(false));
        assert_eq!(check(Some("http://localhost:4317"), &[]), Ok(true));
        assert_eq!(check(None, &[(endpoint, "http://localhost:4317"), (protocol, "grpc")]), Ok(true));
        let error = check(Some("https://collector"), &[]).unwrap_err();
        assert!(error.starts_with("--otlp-endpoint is https://collector, but must be an http:// address: "), "{error}");
        let error = check(None, &[(endpoint, "collector")]).unwrap_err();
        assert!(error.starts_with("OTEL_EXPORTER_OTLP_ENDPOINT is collector, but must be the address of"), "{error}");
        let error = check(None, &[(endpoint, "http://localhost:4318"), (protocol, "http/protobuf")]).unwrap_err();
        assert!(error.starts_with("OTEL_EXPORTER_OTLP_PROTOCOL is http/protobuf, but must be grpc"), "{error}");
    }
}
