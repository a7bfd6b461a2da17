"""Small models that no target names: of diffusers, torch_geometric and torchaudio; recurrent ones.

Each function returns a model and its positional inputs; libraries are imported where they are used.
"""

from __future__ import annotations

import torch
from torch import nn


def _images(channels=4, side=16):
    return torch.randn(2, channels, side, side)


# --- diffusers ------------------------------------------------------------------------------------


def unet_2d():
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(16, 32), norm_num_groups=8, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, [_images(), torch.tensor([3, 7])]


def unet_2d_condition():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        cross_attention_dim=32, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, [_images(), torch.tensor([3, 7]), torch.randn(2, 6, 32)]


def autoencoder_kl():
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, [_images(3, 32)]


def autoencoder_tiny():
    from diffusers import AutoencoderTiny

    model = AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 1), num_decoder_blocks=(1, 1),
    )  # fmt: skip
    return model, [_images(3, 32)]


def vq_model():
    from diffusers import VQModel

    model = VQModel(
        block_out_channels=(16, 32), norm_num_groups=8, latent_channels=3, num_vq_embeddings=32,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, [_images(3, 32)]


def dit():
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8, in_channels=4,
        num_embeds_ada_norm=16, norm_num_groups=4,
    )  # fmt: skip
    return model, [_images(4, 8), torch.tensor([3, 7]), torch.tensor([1, 2])]


def pixart():
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=2, sample_size=8,
        cross_attention_dim=16, caption_channels=24, out_channels=8,
    )  # fmt: skip
    return model, [_images(4, 8), torch.randn(2, 5, 24), torch.tensor([3, 7])]


def unet_1d():
    from diffusers import UNet1DModel

    model = UNet1DModel(
        block_out_channels=(8, 16), in_channels=14, out_channels=14,
        time_embedding_type="positional", use_timestep_embedding=True, act_fn="mish",
        layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownResnetBlock1D", "DownResnetBlock1D"),
        up_block_types=("UpResnetBlock1D",), mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock", flip_sin_to_cos=False, freq_shift=1.0,
    )  # fmt: skip
    return model, [torch.randn(2, 14, 16), torch.tensor([3, 7])]


# --- torch_geometric ------------------------------------------------------------------------------


def _graph(nodes=24, edges=80):
    return torch.randn(nodes, 16), torch.randint(0, nodes, (2, edges))


def _convolutions(name, *sizes, **settings):
    import torch_geometric.nn

    layer = getattr(torch_geometric.nn, name)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = layer(16, 32, **settings), layer(*sizes, 8, **settings)

        def forward(self, x, edges):
            return self.last(self.first(x, edges).relu(), edges)

    return Graph(), list(_graph())


def gcn():
    return _convolutions("GCNConv", 32)


def sage():
    return _convolutions("SAGEConv", 32)


def gat():
    return _convolutions("GATv2Conv", 32)


def graph_transformer():
    return _convolutions("TransformerConv", 32)


def tag():
    return _convolutions("TAGConv", 32)


# --- torchaudio -----------------------------------------------------------------------------------


def conformer():
    from torchaudio.models import Conformer

    model = Conformer(
        input_dim=32, num_heads=4, ffn_dim=64, num_layers=2, depthwise_conv_kernel_size=7
    )
    return model, [torch.randn(2, 20, 32), torch.tensor([20, 14])]


def conv_tasnet():
    from torchaudio.models import ConvTasNet

    model = ConvTasNet(
        enc_num_feats=32, msk_num_feats=16, msk_num_hidden_feats=32, msk_num_layers=2,
        msk_num_stacks=1,
    )  # fmt: skip
    return model, [torch.randn(2, 1, 800)]


def deep_speech():
    from torchaudio.models import DeepSpeech

    return DeepSpeech(n_feature=16, n_hidden=32, n_class=8, dropout=0.0), [
        torch.randn(2, 1, 20, 16)
    ]


def wav2letter():
    from torchaudio.models import Wav2Letter

    return Wav2Letter(num_classes=8, input_type="mfcc", num_features=13), [torch.randn(2, 13, 200)]


def hdemucs():
    from torchaudio.models import HDemucs

    return HDemucs(["a", "b"], channels=8, depth=4, nfft=512), [torch.randn(1, 2, 8192)]


# --- Recurrent and state-space --------------------------------------------------------------------


class _Recurrent(nn.Module):
    def __init__(self, kind, **settings):
        super().__init__()
        self.layer = getattr(nn, kind)(16, 24, batch_first=True, **settings)

    def forward(self, x):
        return self.layer(x)


def lstm():
    return _Recurrent("LSTM", num_layers=2), [torch.randn(2, 12, 16)]


def lstm_both_ways():
    return _Recurrent("LSTM", bidirectional=True, proj_size=8), [torch.randn(2, 12, 16)]


def gru():
    return _Recurrent("GRU", num_layers=2), [torch.randn(2, 12, 16)]


def rnn():
    return _Recurrent("RNN", nonlinearity="relu"), [torch.randn(2, 12, 16)]


class DiagonalStateSpace(nn.Module):
    """A diagonal linear recurrence, run step by step or as a convolution in Fourier space."""

    def __init__(self, width=16, states=8, *, by_fourier=False):
        super().__init__()
        self.by_fourier = by_fourier
        self.decay = nn.Parameter(torch.rand(width, states))
        self.enter = nn.Parameter(torch.randn(width, states))
        self.leave = nn.Parameter(torch.randn(width, states))

    def forward(self, x):
        """The outputs of all steps."""
        decay = torch.exp(-torch.nn.functional.softplus(self.decay))
        if not self.by_fourier:
            state = x.new_zeros(*x.shape[::2], self.decay.shape[1])
            outputs = []
            for step in x.unbind(1):
                state = decay * state + self.enter * step.unsqueeze(-1)
                outputs.append((state * self.leave).sum(-1))
            return torch.stack(outputs, 1)
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        kernel = ((self.enter * self.leave).unsqueeze(-1) * decay.unsqueeze(-1) ** steps).sum(1)
        size = 2 * x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=size) * torch.fft.rfft(kernel, n=size)
        return torch.fft.irfft(spectrum, n=size)[..., : x.shape[1]].transpose(1, 2)


def state_space():
    return DiagonalStateSpace(), [torch.randn(2, 12, 16)]


def state_space_by_fourier():
    return DiagonalStateSpace(by_fourier=True), [torch.randn(2, 32, 16)]
