//! Writes tensors as .npy files that `bitnet-np check` reads. Copy this file into your engine as a module; it needs no crate.
//!
//! `dump(&format!("attn_norm-{layer}"), &[tokens, width], &x)?` writes dump/attn_norm-3.npy. While tokens are decoded, give the rows of
//! each call the number of its step: `dump(&format!("attn_norm-{layer}.step-{step}"), &[1, width], &x)?`.

/// Writes dump/<name>.npy: float32, row by row.
pub fn dump(name: &str, shape: &[usize], x: &[f32]) -> std::io::Result<()> {
    write(name, shape, "<f4", x.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// The same for the codes of activations, such as attn_norm_codes-3.
pub fn dump_i8(name: &str, shape: &[usize], x: &[i8]) -> std::io::Result<()> {
    write(name, shape, "|i1", x.iter().flat_map(|v| v.to_le_bytes()).collect())
}

/// The same for the token ids, so that the dump says what it is of: `dump_i32("tokens", &[ids.len()], &ids)?`.
pub fn dump_i32(name: &str, shape: &[usize], x: &[i32]) -> std::io::Result<()> {
    write(name, shape, "<i4", x.iter().flat_map(|v| v.to_le_bytes()).collect())
}

fn write(name: &str, shape: &[usize], dtype: &str, data: Vec<u8>) -> std::io::Result<()> {
    let shape = format!("{shape:?}").replace('[', "(").replace(']', ",)");
    let header = format!("{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}");
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend((header.len() as u16).to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(data);
    std::fs::create_dir_all("dump")?;
    std::fs::write(format!("dump/{name}.npy"), file)
}
