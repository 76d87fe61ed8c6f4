//! A connection to the front end, over mutual TLS.

use std::io;

use hyper_util::rt::TokioIo;
use looplane_proto::fleet::v1::fleet_client::FleetClient;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::super::{BEAT, HELLO_LIMIT, Io, MOST_MESSAGE_BYTES, MOST_SILENT, WINDOW_BYTES, with_causes};
use super::JoinConfig;

/// Connects.
///
/// # Errors
/// What failed, with the address.
pub(super) async fn dial(config: &JoinConfig) -> Result<FleetClient<Channel>, String> {
    let address = config.address();
    let unreachable = |why: String| format!("cannot reach the front end at {address}: {why}");
    let ping = BEAT * MOST_SILENT;
    let endpoint = Endpoint::from_static("http://front")
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .http2_keep_alive_interval(ping)
        .keep_alive_timeout(ping)
        .keep_alive_while_idle(true);
    let connected = timeout(HELLO_LIMIT, connect(endpoint, config)).await;
    let channel = connected.map_err(|_| unreachable(format!("no connection within {HELLO_LIMIT:?}")))?;
    let channel = channel.map_err(|error| unreachable(with_causes(&error)))?;
    Ok(FleetClient::new(channel).max_decoding_message_size(MOST_MESSAGE_BYTES))
}

async fn connect(endpoint: Endpoint, config: &JoinConfig) -> Result<Channel, tonic::transport::Error> {
    let (tls, front, port) = (config.secrets.current().tls.clone(), config.front.clone(), config.port);
    let connector = service_fn(move |_| {
        let (tls, front) = (tls.clone(), front.clone());
        async move {
            let stream = TcpStream::connect((front.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let io: Box<dyn Io> = match tls {
                None => Box::new(stream),
                Some(tls) => {
                    let name = ServerName::try_from(front).map_err(io::Error::other)?;
                    Box::new(TlsConnector::from(tls).connect(name, stream).await?)
                }
            };
            Ok::<_, io::Error>(TokioIo::new(io))
        }
    });
    endpoint.connect_with_connector(connector).await
}
