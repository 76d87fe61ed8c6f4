//! Messages of the inference service: read as bytes and decoded by whoever has the time, written as protobuf.

use std::marker::PhantomData;

use bytes::{Buf, Bytes};
use prost::Message;
use tonic::{
    Status,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder},
};
use tonic_prost::ProstEncoder;

/// What a message's buffer begins with. Each message is a frame of its own: tonic would otherwise draw as many as there
/// are until it has 32 KiB, also for a client that does not read.
const BUFFER_BYTES: usize = 1 << 10;

/// Takes any message's bytes and writes messages of type `T`.
#[derive(Debug)]
pub(super) struct RawRequests<T>(PhantomData<T>);

impl<T> Default for RawRequests<T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + Send + 'static> Codec for RawRequests<T> {
    type Encode = T;
    type Decode = Bytes;
    type Encoder = ProstEncoder<T>;
    type Decoder = RawDecoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(BufferSettings::new(BUFFER_BYTES, 1))
    }

    fn decoder(&mut self) -> Self::Decoder {
        RawDecoder
    }
}

/// Leaves a message as it is.
#[derive(Debug)]
pub(super) struct RawDecoder;

impl Decoder for RawDecoder {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buffer.copy_to_bytes(buffer.remaining())))
    }
}
